"""What a merge will do, decided from headers before a byte is written.

Every output tensor gets one `Op`, every adapter tensor is used by exactly one of them, and what
does not fit is an error that names it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tuneserve.checkpoint.headers import DTYPE_BITS, Checkpoint, Shard, TensorInfo
from tuneserve.errors import AdapterError
from tuneserve.merge.adapter import FLOAT_DTYPES, Adapter, Lora
from tuneserve.merge.complete import is_loaded, missing_parts
from tuneserve.merge.names import locator, runner
from tuneserve.merge.ties import Ties, find_ties

# Architectures of transformers whose linear layers are Conv1D: the weight is stored as (in, out).
# Elsewhere a weight is taken for one only where the adapter says so (fan_in_fan_out); a transposed
# update of a plain layer is a mistake, not another way to store it.
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})


@dataclass(frozen=True)
class Op:
    """How one output tensor is made: from `source`, then the steps that are set, in this order.

    Attributes:
        source: Tensor of the base, or of the adapter where it was trained whole; cast to the dtype.
        nf4: Take the weight through NF4 and back, as the adapter saw it in training.
        lora: Add a low-rank update, with a DoRA magnitude where there is one.
        stored_transposed: The weight is stored as (in, out).
        tokens: Put these rows of an adapter tensor in.
        bias: Add the bias of lora_B times the scale.
    """

    source: TensorInfo
    from_adapter: bool = False
    nf4: bool = False
    lora: Lora | None = None
    stored_transposed: bool = False
    tokens: tuple[TensorInfo, tuple[int, ...]] | None = None
    bias: Lora | None = None

    @property
    def kind(self) -> str:
        """copy, lora, dora, tokens, bias, replace or nf4: the step that says most."""
        if self.lora:
            return "dora" if self.lora.magnitude else "lora"
        if self.tokens:
            return "tokens"
        if self.bias:
            return "bias"
        if self.from_adapter:
            return "replace"
        return "nf4" if self.nf4 else "copy"

    def adapter_tensors(self) -> list[TensorInfo]:
        """The adapter tensors it uses."""
        found = [self.source] if self.from_adapter else []
        if self.lora:
            found += [t for t in self.lora.tensors() if t is not self.lora.bias]
        if self.bias and self.bias.bias:
            found.append(self.bias.bias)
        return found + ([self.tokens[0]] if self.tokens else [])


@dataclass(frozen=True)
class Output:
    """One tensor of the merged checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    op: Op

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class OutputShard:
    """One file of the merged checkpoint, in the order of the base's file."""

    source: Shard = field(repr=False)
    outputs: tuple[Output, ...]

    @property
    def name(self) -> str:
        """The file's name, the same as the base's."""
        return self.source.file.name

    @property
    def same_layout(self) -> bool:
        """Whether no shape changed and nothing was added: the base's header serves as it is."""
        return [(o.name, o.shape) for o in self.outputs] == [
            (t.name, t.shape) for t in self.source.tensors
        ]


@dataclass(frozen=True)
class MergePlan:
    """The whole merge.

    Attributes:
        shards: The files, in order.
        config: Changes to the base's config.json (tied flag, vocabulary size).
        vocabulary: Rows of the merged input embedding; None where no embedding was recognized.
        aliases: Pairs of adapter tensors that must hold the same bytes.
    """

    shards: tuple[OutputShard, ...]
    config: Mapping[str, Any]
    vocabulary: int | None
    aliases: tuple[tuple[TensorInfo, TensorInfo], ...]

    def counts(self) -> dict[str, int]:
        """How many output tensors there are of each kind."""
        return dict(Counter(o.op.kind for s in self.shards for o in s.outputs))

    @property
    def data_bytes(self) -> int:
        """Bytes of all output tensors."""
        return sum(o.nbytes for s in self.shards for o in s.outputs)


def plan_merge(
    base: Checkpoint,
    config: Mapping[str, Any],
    adapter: Adapter,
    nf4_modules: frozenset[str] = frozenset(),
) -> MergePlan:
    """Decide every output tensor.

    Args:
        base: The base's headers.
        config: The base's config.json.
        adapter: The adapter.
        nf4_modules: Modules that training held in NF4 and whose weights are taken through it.

    Raises:
        AdapterError: Tensors of the adapter have no place, or do not fit; all are named.
    """
    planner = _Planner(base, config, adapter)
    planner.place_saved()
    planner.place_loras()
    planner.place_tokens()
    planner.place_nf4(nf4_modules)
    planner.check_complete()
    planner.check_grown()
    if planner.problems:
        raise AdapterError(
            f"{adapter.folder} does not fit {base.folder}: "
            f"{'; '.join(planner.problems[:10])}"
            + (f"; and {len(planner.problems) - 10} more" if len(planner.problems) > 10 else ""),
            expected="the base that the adapter was trained on",
            hint="pass the base named by base_model_name_or_path in adapter_config.json "
            f"({adapter.config.get('base_model_name_or_path')!r})",
            details={"problems": planner.problems[:100]},
        )
    return planner.result()


class _Planner:
    """Builds the ops step by step, collecting problems."""

    def __init__(self, base: Checkpoint, config: Mapping[str, Any], adapter: Adapter) -> None:
        self.base, self.config, self.adapter = base, config, adapter
        self.problems: list[str] = []
        self.locate = locator(base, adapter)
        self.ties: Ties = find_ties(base, config, adapter, self.locate)
        self.ops = {name: Op(info) for name, info in base.tensors.items()}
        self.dtypes = {name: info.dtype for name, info in base.tensors.items()}
        self.shapes = {name: info.shape for name, info in base.tensors.items()}
        self.aliases = list(self.ties.aliases)
        self._is_conv1d_model = config.get("model_type") in _CONV1D_MODELS
        if self.ties.new_head and self.ties.new_head not in self.ops:
            # A head of its own starts as what it was tied to.
            info = base.tensors[self.ties.embedding]
            self.ops[self.ties.new_head] = Op(info)
            self.dtypes[self.ties.new_head] = info.dtype
            self.shapes[self.ties.new_head] = info.shape

    def find(self, runtime_name: str) -> str | None:
        """The output tensor that a parameter of the running model is stored as."""
        name = self.locate(runtime_name)
        if self.ties.tied and name == self.ties.head:
            return self.ties.embedding
        return name if name in self.ops else None

    def place_saved(self) -> None:
        """Parameters that were trained whole, or saved because the vocabulary grew."""
        for runtime_name, infos in self.adapter.saved.items():
            if runtime_name in self.ties.skipped:
                continue
            name = self.find(runtime_name)
            if name is None:
                self.problems.append(f"{infos[0].name}: the base has no {runtime_name}")
                continue
            info, shape = infos[0], self.shapes[name]
            self.aliases += [(info, other) for other in infos[1:]]
            is_vocabulary = name in (self.ties.embedding, self.ties.head, self.ties.new_head)
            grown = is_vocabulary and info.shape[1:] == shape[1:]
            if info.shape != shape and not grown:
                self.problems.append(
                    f"{info.name}: has shape {list(info.shape)}, {name} has {list(shape)}"
                )
                continue
            self._check_float(name)
            self.ops[name] = replace(self.ops[name], source=info, from_adapter=True)
            self.shapes[name] = info.shape
            other = self.ties.follower
            if other and name in (self.ties.embedding, self.ties.new_head):
                self.ops[other] = replace(self.ops[other], source=info, from_adapter=True)
                self.shapes[other] = info.shape

    def place_loras(self) -> None:
        """Low-rank updates, and the biases of lora_B."""
        for module, lora in self.adapter.loras.items():
            name = self.find(f"{module}.weight")
            if name is None:
                self.problems.append(f"{lora.a.name}: the base has no {module}.weight")
                continue
            transposed = self._orientation(lora, name)
            if transposed is None:
                continue
            self._check_float(name)
            self.ops[name] = replace(self.ops[name], lora=lora, stored_transposed=transposed)
            self._check_magnitude(lora, name, transposed)
            if lora.bias:
                self._place_bias(lora, f"{module}.bias")

    def _orientation(self, lora: Lora, name: str) -> bool | None:
        """Whether the weight is stored as (in, out); None after a misfit was noted."""
        shape = self.shapes[name]
        (_, inner), (outer, _) = lora.a.shape, lora.b.shape
        if lora.embedding:
            fits, flipped = shape == (inner, outer), False
        else:
            fits, flipped = shape == (outer, inner), shape == (inner, outer)
            flipped = flipped and self._may_be_transposed(lora.module)
        if not fits and not flipped:
            self.problems.append(
                f"{lora.module}: the update is {outer} x {inner}, {name} has shape {list(shape)}"
            )
            return None
        if fits and flipped:
            return self._square_is_transposed()
        return flipped

    def _may_be_transposed(self, module: str) -> bool:
        """Whether the module can be a Conv1D. A head never is: it is a plain linear layer."""
        if f"{module}.weight" == self.ties.head or module.rpartition(".")[2] == "lm_head":
            return False
        return self._is_conv1d_model or bool(self.adapter.config.get("fan_in_fan_out"))

    def _square_is_transposed(self) -> bool:
        """Square weights do not tell; the architecture does, or the other weights."""
        return self._is_conv1d_model or any(
            not lora.embedding
            and (name := self.find(f"{lora.module}.weight"))
            and lora.a.shape[1] != lora.b.shape[0]
            and self.shapes[name] == (lora.a.shape[1], lora.b.shape[0])
            for lora in self.adapter.loras.values()
        )

    def _check_magnitude(self, lora: Lora, name: str, transposed: bool) -> None:
        if lora.magnitude is None:
            return
        along = self.shapes[name][1 if transposed or lora.embedding else 0]
        if math.prod(lora.magnitude.shape) != along:
            self.problems.append(
                f"{lora.magnitude.name}: has shape {list(lora.magnitude.shape)} for {along} outputs"
            )

    def _place_bias(self, lora: Lora, runtime_name: str) -> None:
        assert lora.bias is not None
        name = self.find(runtime_name)
        if name is None or self.shapes[name] != lora.bias.shape:
            found = f"{name} has shape {list(self.shapes[name])}" if name else "there is no bias"
            self.problems.append(
                f"{lora.bias.name}: cannot be added to {runtime_name} ({found}); "
                "a layer without a bias cannot take lora_bias"
            )
            return
        self.ops[name] = replace(self.ops[name], bias=lora)

    def place_tokens(self) -> None:
        """Rows of embeddings that were retrained token by token."""
        for module, (info, rows) in self.adapter.tokens.items():
            if f"{module}.weight" in self.ties.skipped:
                continue
            name = self.find(f"{module}.weight")
            if name is None or len(self.shapes[name]) != 2:
                self.problems.append(f"{info.name}: the base has no embedding {module}.weight")
                continue
            count, width = self.shapes[name]
            outside = [row for row in rows if not 0 <= row < count]
            if outside or info.shape[1] != width:
                self.problems.append(
                    f"{info.name}: {list(info.shape)} with rows {outside[:5] or rows[:5]} does not "
                    f"fit {name} {[count, width]}"
                )
                continue
            self._check_float(name)
            self.ops[name] = replace(self.ops[name], tokens=(info, rows))

    def place_nf4(self, modules: frozenset[str]) -> None:
        """Weights that training saw through NF4."""
        for module in sorted(modules):
            name = self.find(f"{module}.weight")
            if name is None:
                self.problems.append(f"the base has no {module}.weight, quantized in training")
                continue
            op = self.ops[name]
            if op.stored_transposed or self._is_conv1d_model:
                self.problems.append(f"{name}: Conv1D weights are not taken through NF4")
            self._check_float(name)
            self.ops[name] = replace(op, nf4=True)

    def _check_float(self, name: str) -> None:
        if self.dtypes[name] not in FLOAT_DTYPES:
            self.problems.append(
                f"{name}: the base holds it as {self.dtypes[name]}, not as a 16- or 32-bit float"
            )

    def check_complete(self) -> None:
        """Nothing of what was trained may be missing (an adapter of a smaller base)."""
        updated = {name for m in self.adapter.loras if (name := self.find(f"{m}.weight"))}
        saved = {name for name, op in self.ops.items() if op.from_adapter}
        pair = {self.ties.embedding, self.ties.head}
        if self.ties.tied and pair & saved:
            saved |= pair
        loaded = filter(is_loaded(self.config, self.ties.embedding), self.shapes)
        shapes = {name: self.shapes[name] for name in loaded}
        names = [f"{m}.weight" for m in self.adapter.loras]
        running = runner((name, stored) for name in names if (stored := self.find(name)))
        self.problems += missing_parts(self.adapter, shapes, updated, saved, pair, running)

    def check_grown(self) -> None:
        """A vocabulary that grew must have its new rows in the embedding and in the head."""
        pair = (self.ties.embedding, self.ties.new_head or self.ties.head)
        if self.ties.tied or not all(name in self.shapes for name in pair):
            return
        start = self.base.tensors[self.ties.embedding]  # of a head that the base does not store
        changed = any(self.shapes[n] != self.base.tensors.get(n, start).shape for n in pair)
        (least, short), (most, long) = sorted((self.shapes[n][0], n.split(".")[-2]) for n in pair)
        if changed and least != most:
            self.problems.append(
                f"{short} has {least} rows, {long} {most}: the new rows were not saved"
            )

    def result(self) -> MergePlan:
        """The plan; asserts that every adapter tensor was used exactly once."""
        used: Counter[str] = Counter()
        for name, op in self.ops.items():
            infos = op.adapter_tensors()
            if name == self.ties.follower:
                infos = infos[1:]  # its source is the other's
            used.update(info.name for info in infos)
        used.update({other.name for _, other in self.aliases})
        used.update(info.name for info in self.adapter.untrained)
        assert used == Counter(t.name for t in self.adapter.shard.tensors), "a tensor not used once"
        if self.ties.tied and self.ties.head in self.ops:  # the stored copy stays one
            self.ops[self.ties.head] = self._copy_of_embedding()
            self.shapes[self.ties.head] = self.shapes[self.ties.embedding]
        shards = []
        for shard in self.base.shards:
            names = [info.name for info in shard.tensors]
            if shard is self.base.shards[-1]:  # where heads are kept
                names += [name for name in self.ops if name not in self.base.tensors]
            outputs = tuple(
                Output(name, self.dtypes[name], self.shapes[name], self.ops[name]) for name in names
            )
            shards.append(OutputShard(shard, outputs))
        rows = self.shapes[self.ties.embedding][0] if self.ties.embedding else None
        return MergePlan(tuple(shards), self._config(rows), rows, tuple(self.aliases))

    def _copy_of_embedding(self) -> Op:
        op = self.ops[self.ties.embedding]
        return self.ops[self.ties.head] if op.kind == "copy" else op

    def _config(self, rows: int | None) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self.ties.new_head:
            changes["tie_word_embeddings"] = False
        if rows is not None and rows != self.base.tensors[self.ties.embedding].shape[0]:
            changes["vocab_size"] = rows
        return changes
