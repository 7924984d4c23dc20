"""Run an agent of 40 tool calls in a fixed memory: it leaves out the results that it no longer needs.

    pip install openai-agents
    kvkeep serve MODEL --budget 2048 --positions slot --conversations continue     (in another terminal)
    python examples/agent.py http://127.0.0.1:8000 [CALLS]

The client sends its conversation whole each time, without earlier results. The server drops these from the memory, and
reads only what is new.
"""

import asyncio
import itertools
import re
import sys
import time

import httpx
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.run import CallModelData, ModelInputData
from openai import AsyncOpenAI
from openai.types.responses import ResponseUsage

TASK = "Read the report page by page, and say when it ends."
KEPT = 4  # items that stay beside the task: the last two calls and their results
PAGE = "The keeper of the lighthouse noted the wind, the tide and the ships that passed before the evening. "
METRICS = ("kvkeep_row_bytes", "kvkeep_session_memory_bytes", "process_resident_memory_bytes")


def forget(data: CallModelData[None]) -> ModelInputData:
    """Keep the task, and the last calls with their results."""
    task, *rest = data.model_data.input
    STARTS.append(time.perf_counter())
    return ModelInputData([task, *rest[-KEPT:]], data.model_data.instructions)


def bytes_held(url: str) -> list[float]:
    """Return the server's bytes of a row, of kept conversations, and of its process, which only Linux tells."""
    text = httpx.get(f"{url}/metrics").text
    found = [re.search(rf"^{name}\S* (\S+)$", text, re.MULTILINE) for name in METRICS]
    return [float(one[1]) if one else float("nan") for one in found]


def reader(client: AsyncOpenAI, model: str, calls: int) -> Agent[None]:
    """Return an agent with one tool, which it must call: small models do not choose tools by themselves."""
    pages = itertools.count(1)

    @function_tool
    def read_page() -> str:
        """Read the next page of the report."""
        return f"Page {next(pages)} of {calls}. " + PAGE * 5

    return Agent(
        name="reader",
        instructions="You read reports.",
        model=OpenAIChatCompletionsModel(model, client),
        tools=[read_page],
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, include_usage=True
        ),
        reset_tool_choice=False,
    )


async def run(url: str, calls: int) -> None:
    """Make the calls, and print a line for each: its tokens, the time to the first one, the server's bytes."""
    print("call  prompt  cached    new  first token  row MB  kept MB  process MB")
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        agent = reader(client, (await client.models.list()).data[0].id, calls)
        how = RunConfig(call_model_input_filter=forget)
        first = 0.0
        running = Runner.run_streamed(agent, TASK, max_turns=calls, run_config=how, error_handlers=ENOUGH)
        async for event in running.stream_events():
            kind = event.data.type if event.type == "raw_response_event" else ""
            if kind == "response.output_item.added":
                first = time.perf_counter() - STARTS[-1]
            if kind == "response.completed":
                show(event.data.response.usage, first, bytes_held(url))


def show(usage: ResponseUsage, first: float, held: list[float]) -> None:
    """Print the line of a call."""
    prompt, cached = usage.input_tokens, usage.input_tokens_details.cached_tokens
    row, kept, process = (size / 1e6 for size in held)
    print(
        f"{len(STARTS):4}  {prompt:6}  {cached:6}  {prompt - cached:5}  {first * 1e3:8.0f} ms"
        f"  {row:6.1f}  {kept:7.1f}  {process:10.0f}",
        flush=True,
    )


STARTS: list[float] = []
ENOUGH = {"max_turns": lambda data: {"final_output": "All calls were made."}}


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(run(sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 40))
