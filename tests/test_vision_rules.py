"""Every message of the rules about images, whole."""

from __future__ import annotations

import pytest

from residency.budget import Allocation, Budget, Phase, Purpose
from residency.checkpoint.model import Checkpoint, Role, Tensor
from residency.checkpoint.roles import role_and_layer
from residency.engines.base import Capability, CapabilityTable, Models
from residency.testing import facts, finding
from residency.units import GIB, MIB

from residency_plugins.vision import (  # isort: skip
    accounting, back_end, embedding_width, largest_image, lazy_loading, paid_for_nothing, projector, projector_type,
    request_path, tower_file,
)  # fmt: skip

CARD = {
    "name": "card",
    "pools": [{"name": "GPU0", "total_bytes": 8 * GIB, "free_bytes": 8 * GIB}, {"name": "host", "total_bytes": 32 * GIB, "free_bytes": 30 * GIB}],
    "devices": [{"name": "GPU0", "kind": "cuda", "pool": "GPU0", "integrated": False}],
}
WANTED = {"vision": {"enabled": True}}


def tensor(name, *shape):
    role, layer = role_and_layer(name)
    return Tensor(name, 1, "F16", shape, 2 * shape[0] * (shape[1] if len(shape) > 1 else 1), 0, 0, role, layer)


def file(architecture, *tensors, path="file.gguf", **metadata):
    return Checkpoint(path=path, source="gguf", files=(), metadata={"general.architecture": architecture, **metadata}, tensors=tensors)


def language(width=2048, *tensors, **more):
    return file("llama", tensor("token_embd.weight", width, 100), *tensors, path="model.gguf", **{"llama.embedding_length": width, **more})


def tower(kind="mlp", *tensors, **metadata):
    rows = tensors or (tensor("v.blk.0.ffn_up.weight", 64, 64), tensor("mm.2.weight", 64, 2048))
    return file("clip", *rows, path="mmproj.gguf", **{"clip.projector_type": kind, **metadata})


def ask(rule, launch=None, *, main=None, mmproj=None, rows=(), table=None, options=None, machine=CARD, **resolved):
    return finding(
        rule, facts(launch=launch, options=options, machine=machine, models=Models(main=main or language(), mmproj=mmproj),
                    budget=Budget(allocations=tuple(rows), facts=resolved), capabilities=table),
    )  # fmt: skip


def vision(size_bytes, *, pool="GPU0", at_most=None, phase=Phase.LOAD, accounted=True):
    return Allocation(
        pool=pool, purpose=Purpose.VISION, name="tower", phase=phase, certain_bytes=size_bytes, likely_bytes=size_bytes,
        at_most_bytes=at_most or size_bytes, device="GPU0" if pool == "GPU0" else None, accounted=accounted,
    )  # fmt: skip


def weights(size_bytes):
    return Allocation.exact("GPU0", Purpose.WEIGHTS, "weights", Phase.LOAD, size_bytes, device="GPU0")


def said(found):
    return str(found.outcome), found.message


def test_tower_file():
    found = ask(tower_file.rule, WANTED)
    assert said(found) == ("veto", "The launch asks for vision, names no projector file, and the model has no vision tower of its own.")
    assert found.knob == "model.mmproj"
    assert ask(tower_file.rule, WANTED, mmproj=tower()).outcome == "approve"
    assert ask(tower_file.rule, WANTED, main=language(2048, tensor("v.blk.0.ffn_up.weight", 8, 8))).outcome == "approve"
    assert ask(tower_file.rule).outcome == "not-applicable"


def test_projector():
    assert ask(projector.rule, mmproj=tower()).outcome == "approve"
    assert ask(projector.rule).outcome == "not-applicable"
    draft = file("qwen3", tensor("token_embd.weight", 8, 8), path="draft.gguf")
    assert said(ask(projector.rule, mmproj=draft)) == ("veto", 'draft.gguf is not a projector but a model of architecture "qwen3".')
    nameless = Checkpoint(path="x.gguf", source="gguf", files=(), metadata={})
    assert said(ask(projector.rule, mmproj=nameless)) == ("veto", "x.gguf is not a projector but a file that names no architecture.")
    assert said(ask(projector.rule, main=tower())) == ("veto", "mmproj.gguf is a projector, not a language model.")
    audio = tower("ultravox", tensor("a.blk.0.ffn_up.weight", 8, 8))
    assert said(ask(projector.rule, WANTED, mmproj=audio)) == ("veto", "mmproj.gguf has no image encoder, and the launch asks for vision.")
    assert ask(projector.rule, mmproj=audio).outcome == "approve"
    half = tower("qwen3vl_merger", tensor("v.patch_embd.weight", 8, 8), tensor("mm.2.weight", 8, 2048))
    assert said(ask(projector.rule, mmproj=half)) == ("veto", "mmproj.gguf has one half of the patch embedding's pair and lacks the other.")


def test_projector_type():
    table = CapabilityTable(rows=(Capability(id="projector-mlp", title="x"), Capability(id="projector-pixtral", title="x", since="2.0")))
    assert ask(projector_type.rule, mmproj=tower(), table=table).outcome == "approve"
    found = ask(projector_type.rule, mmproj=tower("pixtral"), table=table)  # known to a later version only
    assert said(found) == ("veto", "mmproj.gguf is a projector of type pixtral, and the engine knows mlp, pixtral.")
    assert said(ask(projector_type.rule, mmproj=tower("resampler"), table=table))[1].startswith("mmproj.gguf is a projector of type resampler")
    silent = file("clip", tensor("mm.2.weight", 8, 8), path="old.gguf")
    assert said(ask(projector_type.rule, mmproj=silent, table=table)) == ("veto", "old.gguf does not say what type of projector it is.")
    assert ask(projector_type.rule, mmproj=tower("resampler")).outcome == "not-applicable"  # the engine lists none


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("mlp", ("mm.2.weight", 64, 2048)),
        ("gemma3", ("mm.input_projection.weight", 2048, 64)),  # stored transposed
        ("qwen2.5vl_merger", ("mm.2.weight", 5120, 2048)),
        ("internvl", ("mm.3.weight", 64, 2048)),
        ("idefics3", ("mm.model.fc.weight", 64, 2048)),
        ("something_new", ("mm.proj.weight", 64, 2048)),
    ],
)
def test_embedding_width_is_read_from_the_last_tensor(kind, last):
    made_for = tower(kind, tensor("mm.0.weight", 64, 64), tensor(*last))
    assert ask(embedding_width.rule, main=language(2048), mmproj=made_for).outcome == "approve"
    other = ask(embedding_width.rule, main=language(4096), mmproj=made_for)
    assert other.outcome == "veto"
    if kind in embedding_width.LAST:
        assert other.message == "The projector puts out embeddings of 2048, and the model takes 4096: they were not made for each other."
    else:
        assert other.message == "The model takes embeddings of 4096, and no tensor of the projector has that width: they were not made for each other."


def test_the_projection_is_not_multiplied_by_the_merge_factor():
    # A tool computed 2048 x 2^2 = 8192 for this projector and refused a model of 2048.
    matching = tower("qwen3vl_merger", tensor("mm.0.weight", 4608, 4608), tensor("mm.2.weight", 4608, 2048),
                     **{"clip.vision.projection_dim": 2048, "clip.vision.spatial_merge_size": 2})  # fmt: skip
    assert ask(embedding_width.rule, main=language(2048), mmproj=matching).outcome == "approve"


def test_a_tower_that_feeds_several_layers_may_be_wider():
    wide = tower("qwen3vl_merger", tensor("mm.2.weight", 64, 4 * 2048))
    assert ask(embedding_width.rule, main=language(2048, **{"llama.n_deepstack_layers": 3}), mmproj=wide).outcome == "approve"
    assert ask(embedding_width.rule, main=language(2048), mmproj=wide).outcome == "veto"


def test_request_path():
    lacking = CapabilityTable(rows=(), titles={"vision-request-path": "requests with images"})
    found = ask(request_path.rule, WANTED, mmproj=tower(), table=lacking)
    assert said(found) == ("veto", "The launch asks for vision, and the engine has no path for images of this model: the tower would be loaded and never used.")
    assert found.missing == "vision-request-path"
    assert ask(request_path.rule, WANTED, mmproj=tower()).outcome == "approve"  # unknown is not lacking
    assert ask(request_path.rule, mmproj=tower(), table=lacking).outcome == "not-applicable"


def test_back_end():
    cpu_only = CapabilityTable(rows=(Capability(id="vision-encoder", title="image encoder", platforms=("cpu",)),))
    rows = (weights(GIB),)
    found = ask(back_end.rule, WANTED, mmproj=tower(), table=cpu_only, rows=rows)
    assert said(found) == ("veto", "The back end of GPU0 has no image encoder, and the launch asks for vision.")
    assert (found.missing, found.ways[0].value) == ("vision-encoder", "cpu")
    on_cpu = {"vision": {"enabled": True, "device": "cpu"}}
    assert said(ask(back_end.rule, on_cpu, mmproj=tower(), table=cpu_only, rows=rows)) == ("approve", "encoder on the CPU")
    assert ask(back_end.rule, mmproj=tower(), table=cpu_only, rows=rows).outcome == "not-applicable"
    elsewhere = ask(back_end.rule, {"vision": {"enabled": True, "device": "GPU7"}}, mmproj=tower(), rows=rows)
    assert said(elsewhere) == ("veto", "The encoder is to run on GPU7, and card has no such device; there is: GPU0.")


def test_accounting():
    rows = (weights(7 * GIB), vision(900 * MIB, accounted=False, phase=Phase.BEFORE))
    assert said(ask(accounting.rule, WANTED, rows=rows)) == ("approve", "900 MiB outside the engine's accounting fit")
    over = (weights(7 * GIB + 200 * MIB), vision(900 * MIB, accounted=False, phase=Phase.BEFORE))
    found = ask(accounting.rule, WANTED, rows=over)
    assert said(found) == (
        "veto", "GPU0: the image encoder takes 900 MiB that the engine does not count. With it the launch needs 8.07 GiB of 8.00 GiB; without it, 7.20 GiB.",
    )  # fmt: skip
    assert (found.need_bytes, found.have_bytes, found.pool) == (7 * GIB + 1100 * MIB, 8 * GIB, "GPU0")
    assert ask(accounting.rule, WANTED, rows=(weights(GIB), vision(GIB))).outcome == "not-applicable"
    assert ask(accounting.rule, WANTED, rows=(weights(9 * GIB), vision(GIB, accounted=False))).outcome == "approve"  # too much without it, too


def test_largest_image():
    many = {"vision": {"enabled": True, "max_tokens": 4096}}
    found = ask(largest_image.rule, many, mmproj=tower(), context=2048)
    assert said(found) == ("veto", "One image may take 4096 tokens, and the whole context is 2048.")
    assert (found.ways[0].knob, found.ways[0].value) == ("vision.max_tokens", 1024)
    assert ask(largest_image.rule, {"vision": {"max_tokens": 4096}}, mmproj=tower(), context=2048).outcome == "warn"
    assert ask(largest_image.rule, many, mmproj=tower(), context=4096).outcome == "approve"
    grows = ask(largest_image.rule, WANTED, mmproj=tower(), rows=(weights(7 * GIB), vision(512 * MIB, at_most=2 * GIB)))
    assert said(grows) == ("warn", "GPU0: the largest image allowed grows the encoder by 1.50 GiB while requests run, and 512 MiB is left.")


def test_lazy_loading():
    lacking = CapabilityTable(rows=(), titles={"vision-with-lazy-load": "vision with loading on demand"})
    found = ask(lazy_loading.rule, WANTED, mmproj=tower(), options={"lazy-load": True}, table=lacking)
    assert said(found) == ("veto", "The launch asks for vision and for loading on demand, and the engine refuses the two together.")
    assert (found.knob, found.missing) == ("option:lazy-load", "vision-with-lazy-load")
    assert ask(lazy_loading.rule, WANTED, mmproj=tower(), options={"lazy-load": False}, table=lacking).outcome == "approve"
    late = ask(lazy_loading.rule, WANTED, mmproj=tower(), rows=(vision(GIB, phase=Phase.RUN_TIME),))
    assert said(late) == ("warn", "The tower is loaded at the first image and takes 1.00 GiB then; nothing keeps that free until it comes.")


def test_paid_for_nothing():
    lacking = CapabilityTable(rows=(), titles={"vision-request-path": "requests with images"})
    found = ask(paid_for_nothing.rule, mmproj=tower(), rows=(vision(GIB),), table=lacking)
    assert said(found) == ("warn", "The vision tower takes 1.00 GiB, and no request can use it: the engine has no path for images of this model.")
    off = ask(paid_for_nothing.rule, mmproj=tower(), rows=(vision(GIB),), options={"language-model-only": True})
    assert said(off) == ("warn", "The vision tower takes 1.00 GiB, and no request can use it: vision is switched off.")
    assert ask(paid_for_nothing.rule, mmproj=tower(), rows=(vision(GIB),)).outcome == "approve"
    assert ask(paid_for_nothing.rule, WANTED, mmproj=tower(), rows=(vision(GIB),), table=lacking).outcome == "not-applicable"


def test_the_parts_of_a_tower_are_seen_as_vision():
    assert {t.role for t in tower().tensors} == {Role.VISION}
