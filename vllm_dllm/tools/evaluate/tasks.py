"""Loads tasks of lm-evaluation-harness with their data. Tries each on its first prompt, before a
server starts.

Nothing is downloaded. Data comes from the folder of a task file, from a folder of data sets, or
from Hugging Face's cache.
"""

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2
import yaml
from datasets.exceptions import DatasetGenerationError, DatasetsError
from huggingface_hub import constants
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from vllm_dllm.errors import InputError

DEFAULT_TOKENS = 256
"""The longest answer, in tokens, of a task that sets none: `max_gen_toks` of the harness's
clients."""
MALFORMED = (yaml.YAMLError, jinja2.TemplateError, ImportError, LookupError, TypeError, ValueError)
"""The errors that lm-evaluation-harness raises for a task file that it cannot use."""


def load_tasks(specs: Sequence[str], data: Path) -> dict[str, Task]:
    """Returns tasks by name. A spec is a task file, whose name ends in .yaml or .yml, or a name of
    the harness. The data of a task file is looked for in the file's folder, then in `data`. That of
    a named task, OWNER/NAME, is looked for in the folder of that name in `data`, then in Hugging
    Face's cache.

    Raises:
        InputError: a task cannot be used.
    """
    constants.HF_HUB_OFFLINE = True  # in this process, also for data that is read later
    names = [spec for spec in specs if not _is_file(spec)]
    manager = task_manager(bool(names))
    for name in names:
        if name not in manager.task_index:
            raise InputError(
                f"--task must be a task file (NAME.yaml) or a task of lm-evaluation-harness, got "
                f"'{name}'. `lm-eval ls tasks` lists them."
            )
    tasks: dict[str, Task] = {}
    for spec in specs:
        tasks |= _load_task(manager, spec, data)
    return tasks


@cache
def task_manager(knows_names: bool) -> TaskManager:
    """Returns a task manager of the harness, which knows the harness's own tasks if `knows_names`.
    It is made once, because reading the task names takes seconds."""
    return TaskManager(include_defaults=knows_names)


def _is_file(spec: str) -> bool:
    """Returns whether a spec names a task file, by its ending."""
    return spec.endswith((".yaml", ".yml"))


def _load_task(manager: TaskManager, spec: str, data: Path) -> dict[str, Task]:
    """Returns the tasks of one spec, by name. Raises InputError if they cannot be used."""
    path = Path(spec)
    if _is_file(spec) and not path.is_file():
        raise InputError(f"there is no task file '{spec}'")
    try:
        if not _is_file(spec):
            return _load_in_folder(data, manager, spec)
        try:
            return _load_in_folder(path.parent, manager, str(path.resolve()))
        except FileNotFoundError:
            return _load_in_folder(data, manager, str(path.resolve()))
    except (DatasetGenerationError, StopIteration) as error:
        cause = _first_line(error.__cause__ or error) or "no rows"
        raise InputError(f"the data of task '{spec}' cannot be read: {cause}") from error
    except (OSError, DatasetsError) as error:
        raise InputError(
            f"the data of task '{spec}' was not found ({_first_line(error)}). Download it where "
            f"there is a network, `hf download --repo-type dataset OWNER/NAME --local-dir "
            f"FOLDER/OWNER/NAME`, and give --data FOLDER."
        ) from error
    except InputError:
        raise
    except MALFORMED as error:
        raise InputError(
            f"'{spec}' is not a task that can be used: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _load_in_folder(folder: Path, manager: TaskManager, spec: str) -> dict[str, Task]:
    """Returns the tasks of one spec, with data from a folder, which is the current folder
    meanwhile. Raises InputError and errors of the harness."""
    # The harness resolves data paths from the current folder.
    with contextlib.chdir(folder):
        loaded = manager.load([spec])["tasks"]
        for name, task in loaded.items():
            _try_first_prompt(spec, name, task)
    return loaded


def longest_answer(task: Task) -> int:
    """Returns the most tokens that a task asks for in an answer."""
    return int((task.get_config("generation_kwargs") or {}).get("max_gen_toks", DEFAULT_TOKENS))


def _try_first_prompt(spec: str, name: str, task: Task) -> None:
    """Raises InputError, or an error of the harness, if a task cannot be evaluated or its templates
    do not fit its data."""
    kind = task.get_config("output_type")
    if kind != "generate_until":
        raise InputError(
            f"task '{name}' of '{spec}' must have answers that are generated (output_type "
            f"generate_until), got {kind}: diffusion models give no log-likelihoods of texts"
        )
    # A task's own function may return metrics of any name.
    listed = () if task.get_config("process_results") else task.get_config("metric_list") or ()
    for metric in listed:
        if metric["metric"] not in METRIC_REGISTRY:
            raise InputError(
                f"task '{name}' of '{spec}' has the metric '{metric['metric']}', expected one of "
                f"{', '.join(sorted(METRIC_REGISTRY))}"
            )
    first = next(iter(task.eval_docs))
    task.doc_to_text(first)
    task.doc_to_target(first)


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return str(error).strip().partition("\n")[0]
