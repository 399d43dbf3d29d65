"""Training and evaluation: recipes, the engine, checkpoints that survive being killed, one process or many."""
