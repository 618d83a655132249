"""The reference decoder and the LightningModule around it."""
