"""The sub-commands of `kernelwarehouse`: from parsed arguments to the functions of the other rooms, and their print."""
