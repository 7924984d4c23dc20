"""An example or more for every command: a line to type, and what it does."""

from __future__ import annotations

EXAMPLES: dict[str, dict[str, str]] = {
    "": {
        "kvkeep demo": "See it work; nothing is downloaded",
        'kvkeep generate -p "Once upon a time" --budget 64': "Continue a text with the embedded model in 64 tokens",
        "kvkeep generate MODEL -f report.txt --budget 1024": "The same with your model: a folder, or a hub name",
        "kvkeep chat MODEL": "Talk with it; the conversation is saved",
        "kvkeep plan MODEL --memory 24GiB --budget 1024": "How many rows of it fit into a memory",
    },
    "demo": {
        "kvkeep demo": "Show both scenes",
        "kvkeep demo --seed 5": "Another story and another question",
    },
    "generate": {
        'kvkeep generate -p "Once upon a time" --budget 64': "Continue a text with the embedded model in 64 tokens",
        "kvkeep generate MODEL -f report.txt --policy snapkv": "Your model, a prompt from a file, another policy",
        'kvkeep generate MODEL -p "Hello" --system "Be brief."': "A chat model with a system message",
        "kvkeep generate MODEL -f report.txt -b 1024 --compare": "Beside the full cache",
        "cat report.txt | kvkeep generate MODEL -": "A prompt from standard input",
        "kvkeep generate MODEL --memory report.kvkeep -p Why": "A question about a text that was read before",
        "kvkeep generate --config kvkeep.toml -f report.txt": "With the settings that kvkeep tune has found",
        "kvkeep generate MODEL -i prompts.jsonl -o answers.jsonl": "A batch job that resumes after a stop",
    },
    "remember": {
        "kvkeep remember MODEL -f report.txt -o report.kvkeep": "Read a text once, to ask about it later",
        "kvkeep remember -f report.txt -o b.kvkeep --budget 4K": "In 4096 tokens of the embedded model",
    },
    "chat": {
        "kvkeep chat MODEL": "Begin a conversation",
        "kvkeep chat MODEL --session trip": "Continue one, or begin it under this name",
        "kvkeep chat MODEL --memory report.kvkeep": "Talk about a text that was read before",
        "kvkeep chat --list": "List the saved ones",
    },
    "serve": {
        "kvkeep serve MODEL --budget 2048 --kv-memory 8GiB": "Answer OpenAI's API at http://127.0.0.1:8000/v1",
        "kvkeep serve MODEL --host 0.0.0.0 --key-file keys": "For others, who need one of these keys",
        "kvkeep serve --config server.toml --check": "Check a file of settings",
    },
    "eval": {
        "kvkeep eval MODEL -o results": "Measure four policies at four budgets",
        "kvkeep eval --tasks recall --limit 5 -o results": "A first look at the embedded model",
        "kvkeep eval --report results": "Show the table and draw the plots again",
    },
    "lm-eval": {
        "kvkeep lm-eval -M kvkeep -t arc_easy -a budget=20%": "A task, scored under eviction",
        "kvkeep lm-eval ls tasks": "List its tasks",
    },
    "tune": {
        "kvkeep tune MODEL --text report.txt": "For questions that come after the text was cut",
        "kvkeep tune MODEL --text report.txt --case stream": "For text that goes on",
        "kvkeep tune MODEL --questions mine.jsonl --target 0.95": "For your own questions",
        "kvkeep generate --config tuned/kvkeep.toml -f report.txt": "Use what was found",
    },
    "calibrate": {
        "kvkeep calibrate MODEL --text report.txt -o heads.json": "Measure which heads need the far past",
    },
    "explain": {
        "kvkeep explain -f report.txt -p Why -o page.html": "A page about the embedded model and three policies",
        "kvkeep explain MODEL -f report.txt -p Why --terminal": "Your model, and the text in the terminal",
        "kvkeep explain -f report.txt -p Why --plots pictures": "Strips and maps for a paper, as PNG files",
    },
    "plan": {
        "kvkeep plan MODEL --memory 24GiB --budget 1024": "How many rows fit",
        "kvkeep plan MODEL -b 20% --bandwidth 100GB/s": "How fast they can be at most",
    },
    "policies": {
        "kvkeep policies": "List all policies",
        "kvkeep policies show h2o": "Options, source and known bad cases of one",
    },
    "policies list": {"kvkeep policies --json": "All policies, for programs"},
    "policies show": {"kvkeep policies show h2o": "Options, source and known bad cases"},
    "memory": {
        "kvkeep memory report.kvkeep": "Model, policy, size, and what each layer holds",
        "kvkeep memory report.kvkeep --json": "The positions of every head, for programs",
    },
    "env": {"kvkeep env": "Print it for a bug report", "kvkeep env --json": "For programs"},
}
"""Command without ``kvkeep`` → line → remark. MODEL stands for a folder or a hub name."""
