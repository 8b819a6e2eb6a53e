from __future__ import annotations

from slurmrl.graph.call import Call, Method
from slurmrl.graph.warnings import unread

GENERATE = Call("gen", "actor", Method.GENERATE, "m:C", ("prompt_ids",), ("ids", "extra"))
JUDGE = Call("judge", None, Method.INFERENCE, "m:C", ("ids",), ("rewards",))
TRAIN = Call("train", "actor", Method.TRAIN_STEP, "m:C", ("ids", "rewards"))


def test_keys_that_nobody_reads_are_told_with_their_makers() -> None:
    assert unread((GENERATE, JUDGE, TRAIN), "prompt") == ["'extra' of call 'gen' is read by nobody"]
    assert unread((GENERATE, JUDGE), "prompt") == [
        "'extra' of call 'gen' is read by nobody",
        "'rewards' of call 'judge' is read by nobody",
    ]
    assert unread((TRAIN,), "prompt") == ["'prompt_ids' of the dataset is read by nobody"]


def test_results_of_an_evaluation_need_no_reader() -> None:
    assert unread((GENERATE, JUDGE), "prompt", evaluation=True) == [
        "'extra' of call 'gen' is read by nobody"
    ]
