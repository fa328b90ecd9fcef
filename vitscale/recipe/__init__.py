"""The recipe: one YAML file describes one run, typed and strict.

`load_recipe` reads a file on top of what it extends, applies the command line's settings, and validates the whole
before anything starts. Nothing is silently ignored.
"""

from vitscale.recipe.comparing import FREE_ON_BRANCHING, FREE_ON_RESUME, changes, differences, recipe_sha256
from vitscale.recipe.data import MICRO_MAX_ON_CPU, Cache, Crop, Data, EvalCrop, Normalise, View
from vitscale.recipe.datasets import DATA_ROOT_VARIABLE, find_dataset
from vitscale.recipe.decoders import IJEPA, MAE
from vitscale.recipe.dino import IBOT, Dino
from vitscale.recipe.durations import Course, Duration, Ramp
from vitscale.recipe.evaluation import Evaluator
from vitscale.recipe.fields import explain_fields, json_schema
from vitscale.recipe.image_operations import (
    ColorJitter,
    GaussianBlur,
    Gray,
    ImageOperation,
    LoaderOperation,
    RandAugment,
    RandomErasing,
    Solarize,
    ThreeAugment,
)
from vitscale.recipe.joint_embedding import Contrastive, JointEmbedding, LeJEPA
from vitscale.recipe.objectives import Classification, Context, Distillation, Mixing, Objective, Teacher
from vitscale.recipe.optimizers import SGD, Adafactor, AdamW, Kept, Lamb, Muon, Optimizer, group_of, is_frozen, matches
from vitscale.recipe.reading import (
    apply_setting,
    find_recipe,
    list_recipes,
    load_recipe,
    model_block,
    override,
    read_content,
    read_recipe,
    recipe_name,
    recipe_title,
    recipes_dir,
    refuse_secrets,
    validate_model,
    validate_recipe,
)
from vitscale.recipe.schema import Average, Init, Recipe
from vitscale.recipe.smoke import smoke_form
from vitscale.recipe.watching import Anomalies, Policy, Spike
