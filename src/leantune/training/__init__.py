"""From a config to a trained model: config, data, trainer, checkpoints, summary."""
