import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class LitShapes(L.LightningDataModule):
    """Bright squares or bright bars on noise."""

    def __init__(self, count: int = 128, size: int = 16, batch_size: int = 16):
        super().__init__()
        self.count, self.size, self.batch_size = count, size, batch_size

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.count, 3, self.size, self.size, generator=generator) * 0.3
        labels = torch.arange(self.count) % 2
        middle = self.size // 2
        images[labels == 0, :, middle - 2 : middle + 2, middle - 2 : middle + 2] += 2
        images[labels == 1, :, middle : middle + 1, :] += 2
        cut = self.count * 3 // 4
        self.train = TensorDataset(images[:cut], labels[:cut])
        self.val = TensorDataset(images[cut:], labels[cut:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)
