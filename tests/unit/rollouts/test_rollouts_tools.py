"""Tools, their calls, and the built-in environments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from slurmrl.config.schema import EpisodeSettings, ToolChoice
from slurmrl.errors import UnreadableInputError, UsageError
from slurmrl.rollouts.base import EpisodeItem, PolicyTurn
from slurmrl.rollouts.environments import GuessNumber, ToolCalls
from slurmrl.rollouts.episodes import make_episode
from slurmrl.rollouts.tools import Tools, make_tools
from slurmrl.rollouts.tools.shipped import Calculator, PythonTool

T = TypeVar("T")
OWN = "tests.support.own_episodes"


def wait(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def item(answer: str = "") -> EpisodeItem:
    return EpisodeItem(
        sample_id="7@0", index=0, prompt=(1,), text="", answer=answer, row={}, step=1,
        evaluation=False,
    )  # fmt: skip


def turn(text: str) -> PolicyTurn:
    return PolicyTurn(text=text, tokens=(1,), finish="stop")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" -(2 + 3) * 4 ", "-20"),
        ("10/4", "2.5"),
        ("10/5", "2"),
        ("7//2 + 7%2", "4"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("1e3 + 0.25", "1000.25"),
        ("2**200 - 2**200 + 1", "1"),
    ],
)
def test_calculator_computes_arithmetic(expression: str, value: str) -> None:
    assert wait(Calculator()(expression)) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1/0", "division by zero"),
        ("2**99999999999", "too large"),
        ("9**9**9**9", "too large"),
        ("10.0**400", "too large"),
        ("(-8)**0.5", "not a real number"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("'a'*9", "not arithmetic"),
        ("1 +", "not an expression"),
        ("(" * 150, "not an expression"),
        ("1" * 300, "up to 200 characters"),
        ("1e999", "not a real number"),
        ("\0", "not an expression"),
    ],
)
def test_calculator_rejects_other_expressions(expression: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        wait(Calculator()(expression))


def test_exception_of_a_tool_is_its_result() -> None:
    """The episode continues with the reason; calls and failures are counted."""

    def broken(x: int) -> int:
        raise ValueError(f"no {x}\nand more")

    tools = Tools({"broken": broken, "calculator": Calculator()})

    async def calls() -> list[str]:
        made = [
            await tools.call("broken", 3),
            await tools.call("broken", y=3),
            await tools.call("unknown"),
            await tools.call("calculator", expression="1+1"),
        ]
        return [result.text for result in made]

    texts = wait(calls())
    assert texts[0] == "error: no 3"
    assert texts[1].startswith("error: ")
    assert texts[2] == "error: there is no tool 'unknown'; tools: broken, calculator"
    assert texts[3] == "2"
    assert (tools.calls, tools.failures) == (4, 3)


def test_blocking_tool_does_not_stop_other_tools() -> None:
    """A cancelled call is not awaited."""
    released = []

    def blocking() -> str:
        while not released:
            time.sleep(0.01)
        return "late"

    tools = Tools({"blocking": blocking, "calculator": Calculator()})

    async def both() -> str:
        slow = asyncio.ensure_future(tools.call("blocking"))
        quick = await tools.call("calculator", "2*3")
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])
        return quick.text

    assert wait(both()) == "6"
    released.append(True)


def test_tools_are_created_with_their_options() -> None:
    tools = make_tools(
        {
            "add": ToolChoice(name=f"{OWN}:Adder", options={"more": 1}),
            "calculator": ToolChoice(),
        }
    )
    assert wait(tools.call("add", a=1, b=2)).text == "4"
    tools.close()
    assert tools["add"].closed  # type: ignore[attr-defined]


def multi_turn(name: str, **options: Any) -> dict[str, Any]:
    return {"name": "multi_turn", "environment": {"name": name, "options": options}}


def with_tool(name: str, **options: Any) -> dict[str, Any]:
    return {"name": f"{OWN}:once", "tools": {"t": {"name": name, "options": options}}}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"name": f"{OWN}:several", "options": {"turnz": 1}}, "turnz"),
        ({"name": f"{OWN}:not_callable"}, "not a function or a class"),
        ({"name": f"{OWN}:nothing"}, "has no 'nothing'"),
        (with_tool(f"{OWN}:Adder", x=1), "'x'"),
        (with_tool(f"{OWN}:not_callable"), "not a function or a class"),
        (with_tool(f"{OWN}:once", x=1), "takes no options"),
        (multi_turn(f"{OWN}:Countdown", n=1), "'n'"),
        (multi_turn(f"{OWN}:several"), "called with"),
        (multi_turn("guess_number", low=9, high=1), "exceeds"),
        (multi_turn("tools", format="xml"), "json, brackets"),
        (multi_turn("tools", message="{x}"), "results"),
    ],
)
def test_tool_that_cannot_be_created_is_rejected_with_the_reason(
    settings: dict[str, Any], why: str
) -> None:
    """The check is at submission, because `submit` creates the episode."""
    configured = EpisodeSettings(**settings)
    with pytest.raises(UsageError, match=why):
        make_episode(configured, make_tools(configured.tools))


def test_missing_tool_module_is_named() -> None:
    with pytest.raises(UnreadableInputError, match="no module 'nowhere_at_all'"):
        make_episode(EpisodeSettings(name="nowhere_at_all:x"), Tools({}))


def test_tool_calls_are_answered_in_order() -> None:
    tools = make_tools({"calculator": ToolChoice()})
    environment = ToolCalls(item(), tools, message="<{results}>")
    text = (
        'I ask. <tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
        "<tool_call>\n{not json}\n</tool_call><tool_call>[1]</tool_call>"
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1/0"}}</tool_call>'
    )
    reply = wait(environment.step(turn(text)))
    lines = reply.text.strip("<>").split("\n")
    assert (reply.role, reply.done) == ("tool", False)
    assert lines[0] == "6"
    assert lines[1].startswith("error: the call is not JSON")
    assert lines[2].startswith('error: a call is {"name"')
    assert lines[3] == "error: division by zero"
    assert wait(environment.step(turn("The answer is 6."))).done


def test_calls_written_in_brackets_take_one_argument() -> None:
    environment = ToolCalls(
        item(), make_tools({"c": ToolChoice(name="calculator")}), format="brackets"
    )
    assert wait(environment.step(turn("so [c((1+2)*3)] and [c(2)]"))).text == "9\n2"
    many = "[c(1)]" * 9
    assert "at most 8" in wait(environment.step(turn(many))).text


def test_guessing_game_answers_lower_or_higher() -> None:
    game = GuessNumber(item("42"), Tools({}))
    replies = [wait(game.step(turn(text))) for text in ("50", "is it 7?", "hm", "9" * 5000, "42!")]
    assert [reply.text for reply in replies[:3]] == [
        "lower",
        "higher",
        "Say a number from 1 to 100.",
    ]
    assert [reply.reward for reply in replies] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert [reply.done for reply in replies] == [False] * 4 + [True]
    with pytest.raises(UsageError, match="not an integer"):
        GuessNumber(item("forty"), Tools({}))


def test_programs_run_concurrently_in_sandboxes() -> None:
    """Sandboxes serve several event loops, and end with the tool."""
    tool = PythonTool(timeout_s=60.0, processes=2)
    tools = Tools({"python": tool})

    async def programs() -> list[str]:
        codes = ["print(6*7)", "1/0", "import os; print(os.environ.get('HOME') is None)", "x ="]
        results = await asyncio.gather(*(tools.call("python", code=code) for code in codes))
        return [result.text for result in results]

    try:
        texts = wait(programs())
        assert texts[0] == "42"
        assert "ZeroDivisionError" in texts[1]
        assert texts[2] == "False"
        assert "SyntaxError" in texts[3]
        assert wait(programs())[0] == "42"
    finally:
        tools.close()
