"""What a pickle holds once and names often is counted as often: copies and prints are as large."""

import codecs
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_wlb.checkpoints.pickle_checks import load_plain
from tests.checkpoints.small_checkpoints import Called, written

pytestmark = pytest.mark.timeout(60)  # some of these would never end
AGAIN = "names the same, or itself, again and again"


def nested(join: Callable[[Any], Any], times: int = 40) -> Any:
    value: Any = "a"
    for _ in range(times):
        value = join(value)
    return value


def test_what_a_pickle_holds_once_is_counted_as_often_as_it_names_it() -> None:
    """Whoever prints, copies or walks it takes for ever otherwise."""
    itself: list[Any] = []
    itself.append(itself)
    for value in (
        *(nested(lambda x: [x, x]), nested(lambda x: (x, x)), nested(lambda x: {1: x, 2: x})),
        *(nested(lambda x: OrderedDict(a=x, b=x)), itself, ["a" * 100_000] * 1000),
    ):
        with pytest.raises(pickle.UnpicklingError, match=AGAIN):
            load_plain(written({"epoch": value}))
    with pytest.raises(pickle.UnpicklingError, match=AGAIN):  # each letter is printed as ten
        load_plain(written([["\U0010ffff" * 15] * 1000] * 1000))
    with pytest.raises(pickle.UnpicklingError, match=AGAIN):  # 603 digits
        load_plain(written([[2**2000] * 1000] * 1000))
    shared = dict.fromkeys(range(100), 0.1)
    honest = [[shared] * 3000, ["the path of a file" * 5] * 50_000, [None] * 1_200_000]
    assert load_plain(written(honest)) == honest


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (codecs.encode, ("a" * 20_000, "latin1")),
        (bytearray, (b"a" * 20_000,)),
        (set, (list(range(1000)),)),
        (Counter, (dict.fromkeys(range(1000), 1),)),
        (torch.Size, ((1,) * 1000,)),
    ],
)
def test_calls_copy_what_they_are_given(made: Any, given: Any) -> None:
    few, many = ([Called(made, *given) for _ in range(count)] for count in (50, 5000))
    assert load_plain(written(few)) == [made(*given)] * 50
    with pytest.raises(pickle.UnpicklingError, match=AGAIN):
        load_plain(written(many))


@pytest.mark.parametrize("made", [set, Counter, torch.Size])
def test_no_set_is_made_of_a_tensor_s_rows(made: Any) -> None:
    """One without values may have any number of them."""
    with pytest.raises(pickle.UnpicklingError, match=r"it calls .* with "):
        load_plain(written([Called(made, torch.zeros(10, 0))]))


def test_a_tensor_has_no_more_values_than_its_file() -> None:
    plain, noted = (torch.zeros(1).expand(100_000, 100_000) for _ in range(2))
    noted.note = "a tensor with attributes is made by another call"  # type: ignore[attr-defined]
    for tensor in (plain, noted):
        with pytest.raises(pickle.UnpicklingError, match=r"a tensor of \(100000, 100000\) in 1 "):
            load_plain(written({"best_score": tensor}))
    load_plain(written(torch.zeros(1 << 21)))


def test_nor_do_all_tensors_of_a_file_together() -> None:
    small = {str(number): torch.zeros(1).expand(1 << 12) for number in range(300)}
    tied = torch.zeros(1 << 15)
    shared = {str(number): tied.view(-1) for number in range(200)}
    for many, where in ((small, "in 1 "), (shared, "in 32,768 ")):
        with pytest.raises(pickle.UnpicklingError, match=rf"{where}values, and .* are repeated"):
            load_plain(written(many))
    load_plain(written([dict(list(small.items())[:200]), dict(list(shared.items())[:64])]))
