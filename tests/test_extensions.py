"""What another package brings: named by a dotted path, typed, counted, and a function of each sample's own key."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import jsonschema
import numpy as np
import pytest
import timm
import torch
import yaml
from pydantic import Field
from timm.optim import Lion
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from vitscale import recipe
from vitscale.cli.recipe import recipe as print_recipe
from vitscale.data import draws
from vitscale.data.image_operations import ImageOperation, TrainingInput, to_model_input
from vitscale.data.shards.generated import write_generated_dataset
from vitscale.evaluation import build_evaluators
from vitscale.flops import recipe_work
from vitscale.ground import extensions
from vitscale.ground.errors import RecipeError
from vitscale.models import build_model, constant
from vitscale.objectives import Objective, build_objective, objective_class
from vitscale.recipe import Recipe, json_schema, override
from vitscale.training.beginning.memory import expected_memory
from vitscale.training.beginning.tensors import step_tensors
from vitscale.training.optimizers.rule import Update, rule_of

PACKAGE = Path(__file__).resolve().parent / "example_package"
CPU = torch.device("cpu")


def content(**blocks) -> dict:
    """A recipe that names the example package at every place that can."""
    return yaml.safe_load((PACKAGE / "mixer_rotations.yaml").read_text()) | {"precision": "fp32"} | blocks


def make(*settings: str, **blocks) -> Recipe:
    return override(content(**blocks), settings, "the recipe")


@pytest.fixture(autouse=True)
def _example(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setenv("VITSCALE_EXTENSIONS", "example_vision, test_extensions absent_package")
    monkeypatch.setattr(extensions, "named", {})  # which other tests of this process would read in their messages


class Brighten(recipe.ImageOperation):
    implementation: ClassVar[str] = "test_extensions:Brightening"
    pixels: ClassVar[Literal["uint8", "float"]] = "float"


class Brightening(ImageOperation):
    """Adds a number of each sample's own."""

    @classmethod
    def of(cls, block):
        return cls()

    def __call__(self, images, keys):
        assert images.dtype == torch.float32
        return images + torch.from_numpy(keys * 2.0**-64)[:, None, None, None].float()


class Halve(recipe.ImageOperation):
    implementation: ClassVar[str] = "test_extensions:Halving"
    pixels: ClassVar[Literal["uint8", "float"]] = "uint8"


class Halving(Brightening):
    """Against the contract: another size."""

    def __call__(self, images, keys):
        return images[:, ::2, ::2]


class Nameless(recipe.Objective):
    """Without what the base asks for."""


class Astray(recipe.Objective):
    implementation: ClassVar[str] = "example_vision.rotation:Missing"
    has_classes: ClassVar[bool] = False


class Scaled(recipe.Objective):
    """An objective with a parameter and a key of its own."""

    implementation: ClassVar[str] = "test_extensions:Scaling"
    has_classes: ClassVar[bool] = False
    own: ClassVar[tuple[str, ...]] = ("scale",)

    factor: float = Field(1.0, gt=0, description="of all losses")


class Unlisted(Scaled):
    """The same without `own`."""

    own: ClassVar[tuple[str, ...]] = ()


class Scaling(Objective):
    """Against the contract: its parameter has no initial value."""

    @classmethod
    def of(cls, recipe, num_classes):
        objective = cls(build_model(recipe, None))
        objective.scale = torch.nn.Parameter(torch.empty(1))
        return objective


class Valued(Unlisted):
    implementation: ClassVar[str] = "test_extensions:ValuedScaling"


class ValuedScaling(Scaling):
    def initialiser(self, name):
        return constant(1.0) if name == "scale" else super().initialiser(name)


class Labelled(recipe.Objective):
    """An objective whose model has classes, and whose loss is not one of vitscale's."""

    implementation: ClassVar[str] = "test_extensions:Labelling"
    has_classes: ClassVar[bool] = True


class Labelling(Objective):
    @classmethod
    def of(cls, recipe, num_classes):
        return cls(build_model(recipe, num_classes))


class Hinge(Labelled):
    """The same, with a loss for validation of its own."""

    implementation: ClassVar[str] = "test_extensions:HingeLabelling"


class HingeLabelling(Labelling):
    @classmethod
    def validation_loss(cls, recipe):
        return lambda logits, labels: F.multi_margin_loss(logits, labels, reduction="none")


# ---- Recipes ---------------------------------------------------------------------------------------------------------


def test_a_resolved_recipe_means_the_same():
    resolved = make().dump()
    assert resolved["model"]["family"] == "example_vision.Mixer"
    assert resolved["data"]["operations"] == [{"kind": "example_vision.Solarize", "share": 0.5, "threshold": 128}]
    assert override(resolved, (), "the recipe") == make()
    assert override(resolved, (), "the recipe").dump() == resolved


def test_the_block_of_another_family_is_replaced_whole():
    assert make("model.family=null", "model.name=ViT-Ti/16", "selection=null").model.describe() == "ViT-Ti/16"


@pytest.mark.parametrize(
    ("setting", "key", "told"),
    [
        ("model.family=absent_package.Mixer", "model", "'absent_package'"),
        ("model.family=example_vision.Mixture", "model", "'Mixture'"),
        ("model.family=example_vision.MixerShape", "model", "vitscale.recipe.families.family.Model"),
        ("model.family=example_vision.Rotation", "model", "vitscale.recipe.families.family.Model"),
        ("model.family=mixer", "model", "'mixer'"),
        ("model.family=..Mixer", "model", "'..Mixer'"),
        ("model.family=7", "model", "7"),
        ("model.name=Mixer-B/16", "model", "'Mixer-B/16'"),
        ("model.width=wide", "model.width", "'wide'"),
        ("model.width=0", "model.width", "0"),
        ("model.widht=3", "model.widht", "'model.width'"),
        ("model.mixing=conv", "model", "mixing"),
        ("data.image_size=30", "data.image_size", "8"),
        ("objective.kind=example_vision.Mixer", "objective", "vitscale.recipe.objectives.Objective"),
        ("objective.kind=test_extensions.Nameless", "objective", "has_classes, implementation"),
        ("objective.angle=3", "objective.angle", "unknown"),
        ("optimizer.name=absent_package.Lion", "optimizer", "'absent_package'"),
        ("optimizer.name=example_vision.Mixer", "optimizer", "vitscale.recipe.optimizers.Optimizer"),
        ("optimizer.beta=[0.9]", "optimizer.beta", "unknown"),
        ("optimizer.lr=0", "optimizer.lr", "0"),
        ("data.operations=[{kind: solarise}]", "data.operations.0.kind", "'solarize'"),
        ("data.operations=[{kind: example_vision.Solarize, share: 2}]", "data.operations.0.share", "2"),
        ("evaluation.evaluators=[{kind: example_vision.FeatureNorm, name: n}]", "evaluation.evaluators.0.data", ""),
        ("evaluation.evaluators=[{name: n, train: a, test: b}]", "evaluation.evaluators.0.kind", ""),
        ("selection.metric=features/median", "selection.metric", "features/mean"),
        ("evaluation.validation=test", "evaluation.validation", "example_vision.Rotation"),
    ],
)
def test_a_wrong_path_or_block_is_an_error_that_names_it(setting, key, told):
    with pytest.raises(RecipeError) as error:
        make(setting)
    (line,) = str(error.value).splitlines()[1:]
    # A mistake of two keys is told of the block around them.
    assert key in line
    assert told in line


def test_a_module_that_cannot_be_imported_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VITSCALE_EXTENSIONS", "broken_package")
    with pytest.raises(RecipeError, match=r"broken_package.Mixer.*ZeroDivisionError"):
        make("model.family=broken_package.Mixer")


def planted(folder: Path, monkeypatch, package: str = "planted") -> Path:
    """A package that leaves a file behind when it, a module of it or its `__main__` is imported, and then exits."""
    for name in ("__init__", "__main__", "inner"):
        file = folder / package / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open({str(folder / 'ran')!r}, 'w')\n" + ("raise SystemExit(0)\n" if name == "inner" else ""))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder / "ran"


@pytest.mark.parametrize("allowed", ["", "plant planted_too", "planted.outer", "planted.__main__"])
@pytest.mark.parametrize("path", ["planted.X", "planted.inner.X", "planted.__main__.X"])
@pytest.mark.parametrize(
    "place", ["model.family", "objective.kind", "optimizer.name", "data.operations", "evaluation.evaluators"]
)
def test_what_the_user_has_not_allowed_is_not_imported(tmp_path, monkeypatch, allowed, path, place):
    ran = planted(tmp_path, monkeypatch)
    monkeypatch.setenv("VITSCALE_EXTENSIONS", f"example_vision {allowed}")
    with pytest.raises(RecipeError, match="VITSCALE_EXTENSIONS"):
        make(f"{place}={path}" if "." in place and not place.endswith("s") else f"{place}=[{{kind: {path}, name: n}}]")
    assert not ran.exists()


def test_metadata_in_the_current_folder_allow_nothing(tmp_path, monkeypatch):
    ran = planted(tmp_path, monkeypatch)
    metadata = tmp_path / "planted-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: planted\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vitscale.extensions]\nplanted = planted\n")
    with pytest.raises(RecipeError, match="VITSCALE_EXTENSIONS"):
        make("model.family=planted.X")
    assert not ran.exists()
    monkeypatch.chdir("/")  # as an installed package
    with pytest.raises(RecipeError, match="'X'"):
        make("model.family=planted.X")
    assert ran.exists()


def test_a_package_that_exits_when_it_is_imported_is_an_error(tmp_path, monkeypatch):
    planted(tmp_path, monkeypatch)
    home = tmp_path / ".config/vitscale"
    home.mkdir(parents=True)
    (home / "extensions.txt").write_text("example_vision\nplanted\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RecipeError, match="SystemExit"):
        make("model.family=planted.inner.X")


@pytest.mark.parametrize(
    "path", ["vitscale.__main__.X", "vitscale.pretrain.X", "data_tools.conversion.X", "venv.__main__.X"]
)
def test_programs_are_no_extensions(monkeypatch, path):
    monkeypatch.setenv("VITSCALE_EXTENSIONS", "example_vision vitscale data_tools venv")
    with pytest.raises(RecipeError, match="not allowed"):
        make(f"objective.kind={path}")


def test_an_implementation_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(RecipeError, match=r"example_vision\.rotation:Missing"):
        build_objective(make("objective.kind=test_extensions.Astray"), 1)


@pytest.mark.parametrize("kind", ["Scaled", "Valued"])
def test_a_parameter_without_initial_value_or_not_listed_is_an_error_that_names_it(kind):
    vit = ("model.family=null", "model.name=ViT-Ti/16", "selection=null")
    made = make(*vit, f"objective.kind=test_extensions.{kind}")
    with torch.device("meta"), pytest.raises(RecipeError, match="scale"):
        build_objective(made, 1)


@pytest.mark.parametrize(("kind", "theirs"), [("Labelled", F.cross_entropy), ("Hinge", F.multi_margin_loss)])
def test_an_objective_with_classes_is_validated_by_what_it_predicts(tmp_path, kind, theirs):
    manifest = write_generated_dataset(tmp_path / "train", [6], seed=0)
    write_generated_dataset(tmp_path / "test", [13, 8], seed=1)
    evaluated = f"evaluation={{validation: {tmp_path / 'test'}, batch: 8}}"
    settings = (f"objective.kind=test_extensions.{kind}", evaluated)
    made = make(*settings, "selection=null", "evaluation.evaluators=[]")
    assert objective_class(made).num_outputs(made, manifest) == len(manifest.class_names)
    objective = build_objective(made, len(manifest.class_names))
    seen = []

    def predict(images):
        found = objective(to_model_input(images, CPU, torch.float32))
        seen.append(found.logits)
        return found

    (validation,) = build_evaluators(made, manifest.class_names)
    torch.manual_seed(0)
    for parameter in objective.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        found = dict(validation.run(predict))
        labels = torch.cat([batch.labels[batch.mask] for batch in validation.make_loader()])
        masks = torch.cat([batch.mask for batch in validation.make_loader()])
    logits = torch.cat(seen)[masks]
    assert found["top1"] == (logits.argmax(dim=1) == labels).double().mean()
    assert found["loss"] == pytest.approx(theirs(logits, labels).item(), rel=1e-6)


def test_a_field_of_another_package_is_explained_beside_a_recipe_that_names_it(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content(objective={"kind": "test_extensions.Scaled"})))
    print_recipe([str(path), "objective.factor"], explain=True)
    assert "of all losses" in capsys.readouterr().out


def test_the_memory_of_an_objective_that_draws_is_counted():
    assert step_tensors(make(), 1, 8).saved > 0


def test_draws_take_the_bits_of_signed_and_unsigned_keys_alike():
    keys = pictures(1000)[1].numpy()
    for signed, unsigned in (
        (draws.uniform(keys, 1000), draws.uniform(keys.view(np.uint64), 1000)),
        (draws.normal(keys, 1000), draws.normal(keys.view(np.uint64), 1000)),
        (draws.stratum(keys, 4, 1000), draws.stratum(keys.view(np.uint64), 4, 1000)),
    ):
        assert np.array_equal(signed, unsigned)
    assert (keys < 0).any()


def test_operations_on_uint8_come_first():
    names = ("test_extensions.Brighten", "example_vision.Solarize")
    with pytest.raises(RecipeError, match=f"{names[1]}.*{names[0]}"):
        make(f"data.operations=[{{kind: {names[0]}}}, {{kind: {names[1]}}}]")


def test_editors_know_of_blocks_named_by_a_path():
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not list(validator.iter_errors(content()))
    assert list(validator.iter_errors(content(model={"family": "Mixer"})))
    assert list(validator.iter_errors(content(evaluation={"evaluators": [{"name": "n"}]})))


def test_recipes_are_read_without_torch():
    told = (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); from vitscale.recipe import override; "
        f"override({content()!r}, (), 'r'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", told], check=True)


# ---- What they cost --------------------------------------------------------------------------------------------------


def test_the_family_is_counted_as_torch_counts_it_and_has_timms_parameters():
    made = make("objective={kind: classification}", "model.num_classes=10")
    work = recipe_work(made, 10)
    with torch.device("meta"):
        model = build_model(made, 10)
        images = torch.empty(1, 32, 32, 3)
    with FlopCounterMode(display=False) as counter:
        logits = model(images).logits
        assert counter.get_total_flops() == 2 * work.macs
        logits.sum().backward()
    assert counter.get_total_flops() == 2 * (work.macs + work.backward_macs)
    theirs = timm.models.mlp_mixer.MlpMixer(
        num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=32, mlp_ratio=(0.5, 2.0)
    )
    assert sum(parameter.numel() for parameter in theirs.parameters()) == work.params
    assert sum(parameter.numel() for parameter in model.parameters()) == work.params


def test_the_objectives_head_is_counted_with_the_model():
    made = make()
    work = recipe_work(made, 1)
    with torch.device("meta"):
        objective = build_objective(made, 1)
    assert work.params == sum(parameter.numel() for parameter in objective.parameters())


def test_the_optimizer_steps_as_timms_and_an_audit_knows_it():
    made = make("optimizer.lr=0.01")
    rule = rule_of(made.optimizer)
    weights = [torch.randn(50, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    weights[1].copy_(weights[0])
    ours = rule.build([{"params": weights[:1], "weight_decay": 0.1}])
    ours.param_groups[0]["lr"] = 0.01
    theirs = Lion(weights[1:], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for number in range(1, 6):
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(number))
        weights[0].grad, weights[1].grad = gradient.clone(), gradient.clone()
        mean = ours.state[weights[0]].get("exp_avg", torch.zeros(50))
        before = {"master": weights[0].double(), "exp_avg": mean.double()}
        ours.step(), theirs.step()
        torch.testing.assert_close(weights[0], weights[1])
        after = {"master": weights[0].double(), "exp_avg": ours.state[weights[0]]["exp_avg"].double()}
        for rate, is_right in ((0.01, True), (0.0101, False)):
            update = Update((50,), number, rate, 0.1, 0.9)
            found = rule.of_elements(update, before, gradient.double(), after)
            assert is_right == all(
                bool(((after[kind] - value).abs() <= off).all()) for kind, (value, off) in found.items()
            )
    assert (
        expected_memory(made, 1, 1).optimizer
        < expected_memory(make("optimizer={name: adamw, lr: 0.01}"), 1, 1).optimizer
    )


# ---- What happens to images ------------------------------------------------------------------------------------------


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
    return images, torch.from_numpy(rng.integers(-(2**63), 2**63, count, dtype=np.int64))


def test_without_operations_the_input_is_what_it_was():
    images, keys = pictures(8)
    found = TrainingInput(make("data.operations=[]"))(images, keys, CPU, torch.bfloat16)
    assert torch.equal(found, to_model_input(images, CPU, torch.bfloat16))


def test_an_image_depends_on_its_own_key_alone():
    both = "data.operations=[{kind: example_vision.Solarize}, {kind: test_extensions.Brighten}]"
    prepare = TrainingInput(make(both))
    images, keys = pictures(64)
    whole = prepare(images, keys, CPU, torch.float32)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(prepare(images[order], keys[order], CPU, torch.float32), whole[order])
    parts = [prepare(images[at : at + 8], keys[at : at + 8], CPU, torch.float32) for at in range(0, 64, 8)]
    assert torch.equal(torch.cat(parts), whole)


def test_solarized_are_about_as_many_as_asked_for_and_the_others_are_intact():
    images, keys = pictures(2000)
    found = TrainingInput(make())(images, keys, CPU, torch.float32)
    inverted = to_model_input(torch.where(images >= 128, 255 - images, images), CPU, torch.float32)
    intact = to_model_input(images, CPU, torch.float32)
    is_inverted = (found == inverted).all(dim=(1, 2, 3))
    assert torch.equal(found[~is_inverted], intact[~is_inverted])
    assert abs(int(is_inverted.sum()) - 1000) < 5 * (2000 * 0.25) ** 0.5


def test_two_operations_of_a_kind_draw_independently():
    twice = "data.operations=[{kind: test_extensions.Brighten}, {kind: test_extensions.Brighten}]"
    images, keys = torch.full((1000, 32, 32, 3), 255, dtype=torch.uint8), pictures(1000)[1]
    draws = TrainingInput(make(twice))(images, keys, CPU, torch.float32)[:, 0, 0, 0] - 1
    # The sum of two independent uniform numbers has the variance 1/6; of one twice, 1/3.
    assert abs(draws.var().item() - 1 / 6) < 0.03


def test_an_operation_that_makes_other_sizes_is_an_error_that_names_it():
    prepare = TrainingInput(make("data.operations=[{kind: test_extensions.Halve}]"))
    with pytest.raises(RecipeError, match=r"test_extensions\.Halve"):
        prepare(*pictures(4), CPU, torch.float32)
