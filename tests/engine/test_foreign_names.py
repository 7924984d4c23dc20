"""Parameters under the names of other libraries: the error says the right one."""

import dataclasses
import inspect

import pytest

from kvkeep import Engine, InputError, Request, SamplingParams


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (SamplingParams, "max_tokens", "Write `max_new_tokens`."),
        (SamplingParams, "do_sample", "Write `temperature`: 0 takes the likeliest token"),
        (SamplingParams, "stop", "Write `stop` of `Request`"),
        (SamplingParams, "temprature", "Write `temperature`."),
        (SamplingParams, "xyzzy", "Write one of max_new_tokens, min_new_tokens"),
        (Request, "max_new_tokens", "Write `sampling=SamplingParams(max_new_tokens=…)`."),
        (Request, "max_tokens", "Write `sampling=SamplingParams(max_new_tokens=…)`."),
        (Request, "promt", "Write `prompt`."),
        (Engine, "max_num_seqs", "Write `rows`."),
        (Engine, "dtype", "Write `kvkeep.load(…, dtype=…)`"),
    ],
)
def test_a_name_of_another_library_leads_to_the_right_one(make, name, remedy):
    with pytest.raises(InputError, match=f"{make.__name__} has no parameter '{name}'") as caught:
        make(**{name: 1})
    assert remedy in str(caught.value)


def test_signatures_and_changed_copies_stay():
    assert "max_new_tokens" in inspect.signature(SamplingParams).parameters
    assert "rows" in inspect.signature(Engine).parameters
    assert dataclasses.replace(SamplingParams(), max_new_tokens=3).max_new_tokens == 3
