"""Models on disk: our own checkpoints, how a model is built again, and the checkpoints of the authors' release."""
