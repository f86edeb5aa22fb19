"""The gap report: each class from evidence, each line counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
import small

from chitu_diffusion.intake.gap import ATTENTION, COVERED, GLUE, NOT_COVERED, SHAPE, STAGE, Gap, Piece
from chitu_diffusion.intake.inspection import inspect_model
from chitu_diffusion.intake.source import code_lines


def odd(folder: Path, *changes: tuple[str, str]) -> Gap:
    """The gap report of the odd pipeline, with some of its text replaced."""
    text = small.ODD
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return inspect_model(str(small.write(folder, text, f"odd_{len(list(folder.iterdir()))}.py"))).gap


def pieces(gap: Gap) -> dict[str, Piece]:
    return {piece.name: piece for piece in gap.pieces}


# Name of a piece of the odd pipeline -> its class and its lines of code.
ODD = {
    "OddPipeline.__call__": (COVERED, 11),
    "noise_pred.permute": (SHAPE, 1),
    "self.scheduler.scale_noise": (SHAPE, 1),
    "other_scheduler.step": (SHAPE, 1),
    "self.refiner": (STAGE, 3),
    "self.vocoder": (STAGE, 1),
    "OddPipeline.check_inputs": (GLUE, 3),
    "OddPipeline.prepared": (COVERED, 2),
    "OddPipeline.reordered": (SHAPE, 2),
    "OddPipeline: the rest": (GLUE, 5),
    "Refiner": (STAGE, 3),
    "Slow": (ATTENTION, 5),
    "FluxAttnProcessor": (COVERED, 54),
    "FluxTransformerBlock": (COVERED, 64),
    "FluxSingleTransformerBlock": (ATTENTION, 47),
    "FlowMatchEulerDiscreteScheduler.step": (COVERED, 56),
    "FlowMatchEulerDiscreteScheduler.scale_noise": (SHAPE, 24),
}


def test_every_rule_on_a_pipeline_whose_pieces_are_known(tmp_path: Path) -> None:
    gap = odd(tmp_path)
    found = pieces(gap)
    assert {name: (found[name].kind, found[name].lines) for name in ODD} == ODD
    decodes = [piece for piece in gap.pieces if piece.name == "self.vae.decode"]
    assert [(piece.kind, piece.lines) for piece in decodes] == [(STAGE, 1), (STAGE, 1)]


def test_each_line_of_the_pipeline_is_counted_once(tmp_path: Path) -> None:
    gap = odd(tmp_path)
    text = small.ODD
    start, end = text.index("class OddPipeline"), text.index("\n\n\ndef build")
    counted = sum(p.lines for p in gap.pieces if p.part == "pipeline")
    assert counted == len(code_lines(text[start:end])) - 1, "all but the line of the class itself"
    assert gap.not_covered == sum(p.lines for p in gap.pieces if p.kind in NOT_COVERED)


CURES = {
    "a scheduler call in the loop": (
        ("            latents = self.scheduler.scale_noise(latents, t)\n", ""),
        ("self.scheduler.scale_noise", "FlowMatchEulerDiscreteScheduler.scale_noise"),
    ),
    "a second scheduler": (("other_scheduler.step(noise_pred", "other.walk(noise_pred"), ("other_scheduler.step",)),
    "a module after the loop": (("return self.vocoder(frames)", "return frames"), ("self.vocoder",)),
    "a latent laid out anew": (("noise_pred = noise_pred.permute(0, 2, 1)", "pass"), ("noise_pred.permute",)),
    "a helper that lays out anew": (("x.permute(0, 2, 1)", "x * 2"), ("OddPipeline.reordered",)),
    "a convolution in a block": (
        ("torch.nn.Conv1d(32, 96, 3)", "torch.nn.Linear(32, 96)"),
        ("FluxSingleTransformerBlock",),
    ),
    "a processor without attention": (("transformer_blocks[1].attn.processor = Slow()", "done = True"), ("Slow",)),
}


@pytest.mark.parametrize("cure", CURES)
def test_a_piece_is_covered_when_the_evidence_is_gone(cure: str, tmp_path: Path) -> None:
    change, names = CURES[cure]
    ill, well = pieces(odd(tmp_path)), pieces(odd(tmp_path, change))
    for name in names:
        assert ill[name].kind in NOT_COVERED
        assert name not in well or well[name].kind == COVERED


def test_a_loop_that_calls_no_scheduler_has_no_steps(tmp_path: Path) -> None:
    gap = odd(tmp_path, ("latents = self.scheduler.step(noise_pred, t, latents)[0]", "latents = latents - noise_pred"))
    call = pieces(gap)["OddPipeline.__call__"]
    assert call.kind == SHAPE and "self.scheduler.step" in call.why


# What is known of pipelines of diffusers, read by hand.
KNOWN = {
    "FluxPipeline": {},
    "FluxControlNetInpaintPipeline": {"self.controlnet": STAGE, "self.scheduler.scale_noise": SHAPE},
    "SanaPipeline": {"SanaLinearAttnProcessor2_0": ATTENTION, "SanaTransformerBlock": ATTENTION},
    "StableDiffusionXLPipeline": {"UNet2DConditionModel": ATTENTION},
    "LTX2Pipeline": {"audio_scheduler.step": SHAPE, "self.vocoder": STAGE, "self.audio_vae.decode": STAGE},
    "MochiPipeline": {"MochiAttentionPool": ATTENTION},
    "WanPipeline": {},
}


@pytest.mark.parametrize("name", KNOWN)
def test_pipelines_of_diffusers(name: str) -> None:
    gap = inspect_model(name).gap
    found = pieces(gap)
    assert {piece: found[piece].kind for piece in KNOWN[name]} == KNOWN[name]
    if not KNOWN[name]:
        assert gap.not_covered == 0
    assert found[f"{name}.__call__"].kind == COVERED
    assert all(piece.lines > 0 for piece in gap.pieces), [piece.name for piece in gap.pieces if not piece.lines]


def test_lines_of_code() -> None:
    body = 'def f():\n    """Doc\n    of two."""\n    return (\n        x\n    )\n'
    source = '"""Doc."""\n\nx = 1  # a comment\n# another\n\n\n' + body
    assert code_lines(source) == {3, 7, 10, 11, 12}
