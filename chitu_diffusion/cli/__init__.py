"""The ``chitu`` command: one file per subcommand, assembled by `main`.

Nothing here imports torch or diffusers before a subcommand runs, so that ``--help`` is quick and ``chitu env`` works
where they are broken.
"""
