"""``kvkeep generate``: its options, and where the prompt comes from.

The work is in `kvkeep.cli.generate_run` for one prompt, and in `kvkeep.cli.generate_batch` for a file of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvkeep import parameters
from kvkeep.cli import distributed, options, shell_completion
from kvkeep.cli.files import (
    STANDARD_INPUT,
    STANDARD_OUTPUT,
    check_exists,
    check_input,
    not_empty,
    place,
    read_text,
    refuse_device,
)
from kvkeep.cli.options import (
    ADAPTER,
    BUDGET,
    JSON,
    KEEP_PROMPT,
    MAX_NEW_TOKENS,
    MAX_ROWS,
    NO_DEFAULT,
    POLICY,
    RAY_ADDRESS,
    REPETITION_DETECTION,
    TEMPERATURE,
    CacheOptions,
    argument,
    check_policy,
    described,
    option,
    parse_bytes,
    parse_system,
)
from kvkeep.cli.usage_errors import exists, quoted, quotes_missing, shown
from kvkeep.errors import InputError
from kvkeep.parameters import MEMORY, SAMPLING
from kvkeep.policies import DEFAULT
from kvkeep.result_files import is_address

_PROMPT, JOB = "Prompt", "Batch job"
"""Groups of options on the page of help."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of a batch job that a single prompt does not have.

    Attributes:
        input: file or folder of prompts, or its address.
        output: JSONL or Parquet file of completions, or its address; ``-`` is standard output.
        skip_bad: whether lines that cannot be run are set aside; otherwise they stop the job.
        max_rows: sequences that run at once.
        kv_memory: bytes that all sequences may take together.
        compile: whether norms and feed-forward layers are compiled.
        workers: number of workers on Ray; ``None`` for an engine in this process.
        address: of a cluster of Ray; ``None`` for one of this machine alone.
    """

    input: str
    output: str
    skip_bad: bool
    max_rows: int | None
    kv_memory: int | None
    compile: bool
    workers: int | None = None
    address: str | None = None


def parse_memory(text: str, option: str) -> str:
    """Return the file name that ``--memory`` gives, as it is. The file need not exist.

    Raises:
        InputError: there is no such file, and the text is empty or looks like a size such as ``2GB``.
    """
    if exists(text):  # a file may be called 2GB
        return text
    if not text.strip():
        raise InputError(f"{option} is empty. Give a file that kvkeep remember has written.")
    if text.endswith("B") and text[:1].isdigit():
        raise InputError(
            f"{option} {text} is a size, and {option} takes a file that kvkeep remember has written. For the size of "
            f"all KV memory: --kv-memory {text}"
        )
    return text


# Where the prompt of ``kvkeep generate`` comes from, and words that were meant to be a prompt.

_PURPOSE = "Give the model some text to continue."


def standard_input(
    model: str | None, source: str | None, prompt: str | None, file: str | None
) -> tuple[str | None, str | None]:
    """Return the model and the prompt file. An argument ``-``, alone or after the model, is the prompt file ``-``.

    Raises:
        InputError: another word follows the model, or there is another prompt.
    """
    if source is None and model == STANDARD_INPUT:
        model, source = None, STANDARD_INPUT
    if source is None:
        return model, file
    if source != STANDARD_INPUT:
        if prompt is not None:
            # a model that exists was meant as one, and is no word of the prompt
            parts = (prompt, source) if model is None or exists(model) else (prompt, model, source)
            raise InputError(f"Unexpected argument {shown(source)}. {quotes_missing(' '.join(parts))}")
        raise InputError(
            f"Unexpected argument {shown(source)}: after the model only - may follow. For a prompt: -p {quoted(source)}"
        )
    if file is not None:
        raise InputError("- and --prompt-file were both given; one prompt is enough.")
    return model, STANDARD_INPUT


def read_prompt(prompt: str | None, file: str | None, *, model: str | None = None) -> str:
    """Return the text of the prompt, from ``--prompt`` or from a file.

    Args:
        prompt: the text; ``-`` is standard input.
        file: path; ``-`` is standard input.
        model: the model, which may be a prompt or a file that somebody forgot to announce.

    Raises:
        InputError: there is no prompt, there are two, it is empty or the name of a file, or the file cannot be read.
    """
    if prompt == STANDARD_INPUT and file is None:
        prompt, file = None, STANDARD_INPUT
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file were both given; one prompt is enough.")
    if prompt is not None:
        _check_no_file(prompt)
        return not_empty(prompt, "The prompt", _PURPOSE)
    if file is None:
        raise InputError(f"There is no prompt. {_advice(model)}")
    if file == STANDARD_INPUT:
        distributed.refuse_standard_input()
    return read_text(file, kind="prompt file", purpose=_PURPOSE)


def _output_place(output: str) -> str:
    """Return the place of a job's completions: a path in full, an address, or ``-``.

    Raises:
        InputError: the name is empty.
    """
    return output if output == STANDARD_OUTPUT or is_address(output) else str(place(output, "--output"))


def read_schema(file: str, option: str) -> str:
    """Return the JSON schema of a file, as text. Whether it is one is not checked.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    return read_text(file, kind="JSON schema", purpose='Give a schema such as {"type": "object"}.')


def word_of_prompt(model: str | None, prompt: str | None) -> str | None:
    """Return advice about quotes if the model may be the second word of an unquoted prompt; else ``None``.

    It may be if the prompt has no space, the model has no slash, and no file or folder has the model's name.
    """
    if not model or not prompt or "/" in model or " " in prompt or exists(model):
        return None
    return quotes_missing(f"{prompt} {model}")


def _advice(model: str | None) -> str:
    """Return advice on how to give a prompt, for a command without one. ``model`` may have been meant as the prompt."""
    if model is not None and exists(model, folder=False):
        return f"{model} is a file, not a model; to continue its text: --prompt-file {quoted(model)}"
    # a slash is for names of the hub and paths, which were meant as a model
    if model is not None and "/" not in model and not model.startswith("-") and not exists(model):
        return f"If {quoted(model)} is the prompt: -p {quoted(model)}"
    return "Give --prompt TEXT, --prompt-file FILE, or - for standard input."


def _check_no_file(prompt: str) -> None:
    """Refuse a prompt that is the name of an existing file, in place of the file's text.

    Raises:
        InputError: the prompt is such a name.
    """
    # several words are a text, even if a file has them for its name
    if not any(letter.isspace() for letter in prompt) and exists(prompt, folder=False):
        raise InputError(f"The prompt is the name of a file. To read the file: --prompt-file {quoted(prompt)}")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(CacheOptions):
    """The options of a command that continues text, whether prompts or a conversation.

    Attributes:
        prompt: the text to continue.
        adapter: folders of adapters by their names.
        memory: the file of a memory that the text follows.
        policy: the eviction policy; before `checked` it is empty if the user has named none.
        names_policy: whether the user has named the policy.
        names_model: whether the user has named the model; otherwise it is the embedded one, or that of the memory.
    """

    prompt: str = ""
    adapter: Mapping[str, str] = option(ADAPTER)
    system: str | None = None
    raw: bool = False
    memory: str | None = None
    policy: str = ""
    names_policy: bool = False
    names_model: bool = True
    budget: int | None = None
    pin_system: bool = False
    guard: float | None = None
    keep_prompt: bool | float | None = option(KEEP_PROMPT)
    max_new_tokens: int = option(MAX_NEW_TOKENS)
    temperature: float = option(TEMPERATURE)
    top_p: float | None = option(described(parameters.TOP_P))
    top_k: int | None = option(described(parameters.TOP_K))
    min_p: float | None = option(described(parameters.MIN_P))
    repetition_penalty: float = option(described(parameters.REPETITION_PENALTY))
    seed: int = option(described(parameters.SEED))
    repetition_detection: bool | Mapping[str, int] = option(REPETITION_DETECTION)

    def check_values(self) -> None:
        """Refuse a memory, a model or a policy that does not exist, and a dtype or a device that cannot be used.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        if self.memory is not None:
            check_exists(self.memory)
        super().check_values()
        check_policy(self.policy)
        if self.memory is not None:
            from kvkeep.snapshot.positions import HeldPositions  # imports NumPy

            HeldPositions.read(self.memory)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions):
    """Continue a prompt, or a file of prompts (--input), with a bounded KV cache.

    The text goes to standard output while it is generated, and a short summary to standard error.
    """

    source: str | None = argument(
        "Read the prompt from standard input.", default=None, metavar="-", more={"show_default": False}
    )
    prompt_words: str | None = option(
        "The prompt.", "--prompt", "-p", name="prompt", default=None, metavar="TEXT", group=_PROMPT
    )
    prompt_file: str | None = option(
        "UTF-8 file with the prompt; - is standard input.",
        "-f",
        default=None,
        metavar="FILE",
        group=_PROMPT,
    )
    system: str | None = option(
        "A system message, if there is a chat template.",
        read=parse_system,
        default=None,
        metavar="TEXT",
        group=_PROMPT,
    )
    raw: bool = option("Do not apply the tokenizer's chat template.", default=False, group=_PROMPT, rare=True)
    input: str | None = option(
        "JSONL file of prompts, or OpenAI's batch file.",
        "-i",
        default=None,
        metavar="FILE",
        group=JOB,
    )
    output: str | None = option(
        "JSONL or Parquet file or address of the answers. The same command again resumes the job.",
        "-o",
        default=None,
        metavar="FILE",
        group=JOB,
    )
    skip_bad: bool = option(
        "Write lines that cannot be run to OUTPUT.bad, or to standard error for -, and run the others.",
        default=False,
        group=JOB,
        rare=True,
    )
    max_rows: int | None = option(MAX_ROWS, group=JOB, rare=True)
    kv_memory: int | None = option(
        "KV memory of all sequences, e.g. 2GiB or 500MB.",
        read=parse_bytes,
        default=None,
        metavar="SIZE",
        group=JOB,
        rare=True,
    )
    compile: bool = option(
        "Compile norms and feed-forward layers with torch.compile; worth it on a GPU.",
        default=False,
        group=JOB,
        rare=True,
    )
    ray_workers: int | None = option(
        "Run the lines on N engines, each in a process of a cluster of Ray. --max-rows and --kv-memory are then those "
        "of each. Needs the extra kvkeep\\[ray].",
        default=None,
        metavar="N",
        group=JOB,
        rare=True,
    )
    ray_address: str | None = option(RAY_ADDRESS, group=JOB)
    memory: str | None = option(
        "A text that kvkeep remember has read: prompts ask about it, with the policy and budget of the file.",
        read=parse_memory,
        default=None,
        metavar="FILE",
        complete=shell_completion.snapshots,
        group=_PROMPT,
    )
    config: str | None = option(
        "A kvkeep.toml, as [b]kvkeep tune[/b] writes it.",
        default=None,
        metavar="FILE",
        group=MEMORY,
    )
    policy: str = option(POLICY, help=f"{POLICY.help} Default: {DEFAULT}.", default="", more=NO_DEFAULT)
    share_or_tokens: float | int | None = option(
        BUDGET,
        help="Tokens kept per layer and head, e.g. 512 or 4K, or a share of the prompt: 20%. Default: 1024, or less "
        "for a short text.",
        name="budget",
        read=options.parse_budget,
    )
    budget: int | None = None  # this and the next are set by `checked`
    keep_ratio: float | None = None
    pin_system: bool = option(
        "Never evict the system message: that of --system, or those of a file's messages.",
        default=False,
        group=MEMORY,
        rare=True,
    )
    guard: float | None = option(described(parameters.GUARD))
    compare: bool = option("Run a full cache too, and show both.", default=False, group=MEMORY)
    json_schema: str | None = option(
        "JSON schema of the answer (extra: structured).",
        read=read_schema,
        default=None,
        metavar="FILE",
        group=SAMPLING,
    )
    json: bool = option(JSON)

    @property
    def batch(self) -> BatchOptions | None:
        """Return the options of a batch job; ``None`` without ``--input`` or ``--output``."""
        if self.input is None or self.output is None:
            return None
        return BatchOptions(
            input=self.input,
            output=_output_place(self.output),
            skip_bad=self.skip_bad,
            max_rows=self.max_rows,
            kv_memory=self.kv_memory,
            compile=self.compile,
            workers=self.ray_workers,
            address=self.ray_address,
        )

    @property
    def run(self) -> str:
        """Return the function that does the work, as ``module:function``."""
        return "kvkeep.cli.generate_run:serve" if self.input is None else "kvkeep.cli.generate_batch:serve"

    def check_values(self) -> None:
        """Refuse a file of settings or of prompts that cannot be read, and what every generation refuses.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        if self.input is not None:
            check_input(self.input)
        super().check_values()
        if self.config:  # an empty name is refused when the file is read
            from kvkeep.config import Config  # imports torch

            refuse_device(self.config, "configuration")
            Config.read(self.config)

    def checked(self) -> GenerateOptions:
        """Return the options with the text of the prompt and the policy, after checks that concern several options.

        Raises:
            InputError: options exclude each other, or the prompt cannot be read.
        """
        if self.config is not None and self.memory is not None:
            raise InputError(
                "--config and --memory were both given, and a memory has settings of its own. Leave one out."
            )
        model, file = standard_input(self.model, self.source, self.prompt_words, self.prompt_file)
        self._check_batch(file)
        self._check_system()
        if self.input is None:
            options.check_one_adapter(self.adapter, "a prompt")
        prompt = read_prompt(self.prompt_words, file, model=model) if self.input is None else ""
        policy, size = self.policy or DEFAULT, self.share_or_tokens
        return replace(
            self,
            model=model,
            prompt=prompt,
            policy=policy,
            names_policy=self.policy != "",
            budget=size if isinstance(size, int) else None,
            keep_ratio=size if isinstance(size, float) else None,
        )

    def _check_batch(self, file: str | None) -> None:
        """Check the options of a batch job, and that they are given with ``--input`` only.

        Raises:
            InputError: a check fails.
        """
        job = (self.output, self.max_rows, self.kv_memory, self.ray_workers, self.ray_address)
        if self.input is None:
            if self.skip_bad or self.compile or any(given is not None for given in job):
                raise InputError(
                    "--output, --skip-bad, --max-rows, --kv-memory, --compile, --ray-workers and --ray-address belong "
                    "to a batch job: give --input FILE."
                )
            return
        if self.output is None:
            raise InputError("A batch job needs --output FILE, where its completions go; - is standard output.")
        # refuses an empty name
        _output_place(self.output)
        if self.max_rows is not None and self.max_rows < 1:
            raise InputError(f"--max-rows {self.max_rows} runs nothing; give 1 or more.")
        options.check_workers(self.ray_workers, self.ray_address)
        if isinstance(self.share_or_tokens, float):
            raise InputError(
                "--budget is a share, and the lines of a batch job differ in length; give tokens, e.g. 512."
            )
        single = (self.prompt_words, file, self.system, self.json_schema)
        if self.compare or any(given is not None for given in single):
            raise InputError(
                "--input runs a file of prompts; --prompt, --system, --json-schema and --compare are for a single one."
            )

    def _check_system(self) -> None:
        """Check that there is a place for a system message, and that there is one if it is pinned.

        Raises:
            InputError: a check fails.
        """
        if self.system is not None and self.raw:
            raise InputError("--system and --raw were both given; --raw leaves out the chat template, its only place.")
        own = self.compare or self.system is not None or isinstance(self.share_or_tokens, float) or self.pin_system
        if self.memory is not None and own:
            raise InputError(
                "--memory brings the text, its system message and its budget; --system, --pin-system, --compare and a "
                "share as --budget are for prompts without one."
            )
        if self.pin_system and self.input is None and self.system is None:
            raise InputError("--pin-system keeps a system message, and there is none; give --system TEXT.")
