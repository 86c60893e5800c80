"""What a kernel takes on a device, beside the least it could take: workloads with a check, a peak, a timer."""
