"""The methods that the paper compares with, one file a method: its formula, its layer, and where it goes in a backbone.

Every file has a `convert(model)` that returns a changed copy of a static model.
"""

from kernelwarehouse.peers import cbam, cgc, condconv, dcd, dyconv, eca, kwod, odconv, se, weightnet

__all__ = ["cbam", "cgc", "condconv", "dcd", "dyconv", "eca", "kwod", "odconv", "se", "weightnet"]
