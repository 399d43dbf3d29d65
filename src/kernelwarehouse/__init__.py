"""KernelWarehouse for PyTorch: dynamic convolution with warehouses of shared kernel cells."""
