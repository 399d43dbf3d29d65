"""Networks side by side: what they cost here, measured in one run, and what the paper says of them."""

from kernelwarehouse.compare.measure import Cost, Setting, Times, measure
from kernelwarehouse.compare.table import Row, make_rows

__all__ = ["Cost", "Row", "Setting", "Times", "make_rows", "measure"]
