import lightning as L
import torch
from torch import nn
from torch.nn import functional as F


class LitClassifier(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 1e-2, dropout: float = 0.1, betas=(0.9, 0.99), activation=nn.ReLU):
        super().__init__()
        self.save_hyperparameters(ignore=["activation"])
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            activation(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            activation(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, 2),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=self.hparams.betas)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]
