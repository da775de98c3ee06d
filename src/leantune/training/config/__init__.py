"""What a run is: flat keys under the names people already type, checked as a whole before anything is loaded."""

from leantune.training.config.read import build_config, load_config
from leantune.training.config.run_config import EXACT_SAVINGS, LORA_METHODS, OUR_OPTIMIZERS, TrainConfig

__all__ = ["EXACT_SAVINGS", "LORA_METHODS", "OUR_OPTIMIZERS", "TrainConfig", "build_config", "load_config"]
