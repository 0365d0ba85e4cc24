"""The sentence and the table that the first out-of-memory leaves."""

from __future__ import annotations

from tuneserve.train.oom import dominated, peaks_by_phase

GIB = 2**30


def test_what_dominated() -> None:
    parts = {"activations: all layers": 9 * GIB, "weights": 5 * GIB, "CUDA context": GIB}
    assert dominated(24 * GIB, GIB, 9 * GIB, 10 * GIB, parts) == (
        "other processes hold 12.0 GiB of the card"
    )
    assert "5.0 GiB are reserved in pieces" in dominated(24 * GIB, GIB, 17 * GIB, 22 * GIB, parts)
    assert dominated(24 * GIB, GIB, 21 * GIB, 22 * GIB, parts) == (
        "most of it: activations: all layers 9.0 GiB, weights 5.0 GiB"
    )


def test_peaks_by_phase_in_order() -> None:
    timeline = [
        {"phase": "load", "seconds": 1, "rss_bytes": 5, "reserved_bytes": 7},
        {"phase": "forward", "seconds": 2, "rss_bytes": 4, "reserved_bytes": 9},
        {"phase": "load", "seconds": 3, "rss_bytes": 6, "reserved_bytes": 2},
    ]
    found = peaks_by_phase(timeline)
    assert list(found) == ["load", "forward"]
    assert found["load"] == {"rss_bytes": 6, "reserved_bytes": 7}
