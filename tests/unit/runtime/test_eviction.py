"""Which models make room."""

from osaurus.runtime.eviction import victims

_RESIDENT = {"small": 3, "large": 6, "middle": 4}


def test_strict_takes_every_other_model() -> None:
    assert victims("strict_single_model", _RESIDENT, incoming_bytes=0, limit_bytes=99) == [
        "large",
        "middle",
        "small",
    ]


def test_manual_takes_the_largest_until_the_rest_fits() -> None:
    for limit, expected in ((17, []), (16, ["large"]), (10, ["large", "middle"]), (0, 3)):
        chosen = victims("manual_multi_model", _RESIDENT, incoming_bytes=4, limit_bytes=limit)
        assert chosen == expected or len(chosen) == expected
