"""Networks side by side: what they cost here, measured in one run, and what the paper says of them."""

from kernelwarehouse.compare.command import add_parsers, networks
from kernelwarehouse.compare.measure import Cost, Setting, Times, measure
from kernelwarehouse.compare.table import Row, make_rows

__all__ = ["Cost", "Row", "Setting", "Times", "add_parsers", "make_rows", "measure", "networks"]
