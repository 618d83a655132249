"""A command line of Lightning's own for training with balanced steps.

    python examples/cli.py fit --config examples/config.yaml
    python examples/cli.py fit --config examples/config.yaml --trainer.max_steps=10
    python examples/cli.py fit --print_config     # every option with its default

Every argument of the Trainer, of ``LanguageModule`` and of ``WLBDataModule`` is an option, and the
configuration that was used is saved beside the logs. The strategy is named by its class in
``config.yaml``, so that its four sizes can be set there.
"""

from lightning.pytorch.cli import LightningCLI

import lightning_wlb as wlb

if __name__ == "__main__":
    LightningCLI(
        wlb.LanguageModule,
        wlb.WLBDataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},  # of a job that Slurm starts again
        auto_configure_optimizers=False,  # the module makes its own, by its arguments
    )
