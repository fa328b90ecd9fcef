"""What lies where in a run directory."""

RECIPE_FILE = "recipe.yaml"
CHECKPOINTS = "checkpoints"
DONE_FILE = "DONE"
