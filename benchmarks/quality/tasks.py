"""The tasks by name, built when first asked for."""

import functools
from pathlib import Path

from quality.character import CharacterTask
from quality.digits import DigitsConvolutionTask, DigitsTransformerTask
from quality.sentence_pairs import SentencePairTask
from quality.smollm import SmolCutTask, SmolTask
from quality.subword import LlamaTask, MixtureTask, Wide1024Task, Wide2048Task
from quality.task import Task

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        CharacterTask,
        LlamaTask,
        Wide1024Task,
        Wide2048Task,
        SentencePairTask,
        MixtureTask,
        SmolCutTask,
        SmolTask,
        DigitsTransformerTask,
        DigitsConvolutionTask,
    )
}


@functools.lru_cache(maxsize=2)
def load_task(name: str, data: Path) -> Task:
    """The task with its data read. The last two are kept; SmolLM2's weights are not worth keeping beside all others."""
    return TASKS[name](data)
