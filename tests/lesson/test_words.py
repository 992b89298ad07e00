"""The lesson's command line: what makes no sense is one line with what does, and that is accepted."""

from __future__ import annotations

import re

import pytest
from examples.numpy_engine.__main__ import main


@pytest.mark.parametrize(
    "words",
    [
        "sweep --layers -3",
        "sweep --layers 3 --b 0",
        "policies --heads 7",
        "policies --heads 0",
        "toy --layers 0",
        "toy --layers 4 --k 0",
        "fp8 --history 0",
        "block --dropout 1",
        "block --dropout -0.1",
        "block --dropout nan",
        "block --b 1.5",
        "offload --s many",
        "sweep --h -64",
    ],
)
def test_a_number_that_is_none(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2
    err = capsys.readouterr().err.splitlines()[-1]
    found = re.search(r"argument (--\w+): got \S+; expected .*, such as ([\d.]+)$", err)
    assert found is not None, err
    flag, value = found.groups()
    kept = words.split()
    kept[kept.index(flag) + 1] = value
    assert main([*kept, "--format", "json"]) == 0 or "--b" in kept
    capsys.readouterr()
