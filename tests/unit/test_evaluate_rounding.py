"""Plain rounding to 4 bits, worked out by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_a_group_is_rounded_to_sixteen_levels_of_its_own() -> None:
    from tuneserve.evaluate.rounding import rounded

    weight = torch.tensor([[7.5, -7.5, 1.0, 0.4]])
    # one scale: 2 x 7.5 / 15 = 1, levels -8 to 7; 7.5 rounds to 8, which does not exist
    assert rounded(weight, -1).tolist() == [[7.0, -8.0, 1.0, 0.0]]
    # groups of two: the second has the scale 2 / 15; 1.0 is 7.5 of it, 0.4 is 3
    expected = [7.0, -8.0, 14 / 15, 0.4]
    assert rounded(weight, 2)[0].tolist() == pytest.approx(expected, rel=1e-6)
    # 3 does not divide 4: one scale a row, as with -1
    assert rounded(weight, 3).tolist() == rounded(weight, -1).tolist()
    assert rounded(torch.zeros(2, 4), 2).tolist() == torch.zeros(2, 4).tolist()
    assert rounded(weight.bfloat16(), -1).dtype == torch.bfloat16


def test_layers_stored_transposed_are_rounded_along_their_inputs() -> None:
    from transformers.pytorch_utils import Conv1D

    from tuneserve.evaluate.rounding import round_to_nearest, rounded

    torch.manual_seed(0)
    conv = Conv1D(8, 4)  # 8 outputs, 4 inputs: weight [4, 8]
    weight = conv.weight.detach().clone()
    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList([conv])})
    assert round_to_nearest(model, 4) == 1
    assert torch.equal(conv.weight, rounded(weight.T, 4).T)
    assert not torch.equal(conv.weight, rounded(weight, 4))


def test_a_yardstick_of_nothing_is_an_error() -> None:
    from tuneserve.errors import ModelError
    from tuneserve.evaluate.rounding import round_to_nearest

    model = torch.nn.ModuleDict({"stack": torch.nn.Linear(8, 8)})
    before = model["stack"].weight.clone()
    with pytest.raises(ModelError, match="no linear layer in its decoder"):
        round_to_nearest(model, 4)
    assert torch.equal(model["stack"].weight, before)


def test_only_the_decoder_s_linear_layers_are_rounded() -> None:
    from tuneserve.evaluate.rounding import round_to_nearest

    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList([torch.nn.ModuleDict({"q": torch.nn.Linear(8, 8)})]),
            "lm_head": torch.nn.Linear(8, 8),
        }
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert round_to_nearest(model, 4) == 1
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == {"layers.0.q.weight"}
