"""The parity matrix: every transformer class of diffusers, in every mode, run at a tiny size and written to `docs/models.*`.

    python tests/matrix            # print it
    python tests/matrix --write    # and write docs/models.md and docs/models.json
    python tests/matrix --write --only cubic LatteTransformer3DModel    # only these strategies and rows; the rest stays

A class that a tiny pipeline of `tiny` runs is run in that pipeline. Any other is built from the small config in `images`,
`videos` or `sounds` and driven by `driven.Driven`: a real pipeline object with a real scheduler and two guidance branches,
which hands the transformer what `inputs` says. A further class is one more entry there; a further mode one more entry of
`modes.MODES`.
"""
