"""Images to train and evaluate on: where they come from, how they are augmented, in which order they are read."""

from kernelwarehouse.data.images import ArrayImages, DataSet, FileImages, Images
from kernelwarehouse.data.sources import open_dataset

__all__ = ["ArrayImages", "DataSet", "FileImages", "Images", "open_dataset"]
