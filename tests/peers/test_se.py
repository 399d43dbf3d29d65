import torch
from per_sample import shake

from kernelwarehouse.peers.se import squeeze_excite


def test_channels_are_scaled_by_their_means():
    gate = shake(squeeze_excite(32).double())
    x = torch.randn(3, 32, 5, 4, dtype=torch.float64)
    w1, w2 = gate.fc1.weight[:, :, 0, 0], gate.fc2.weight[:, :, 0, 0]
    expected = [sample * torch.sigmoid(w2 @ (w1 @ sample.mean((1, 2))).relu()).view(-1, 1, 1) for sample in x]
    torch.testing.assert_close(gate(x), torch.stack(expected))
    assert sum(p.numel() for p in gate.parameters()) == 2 * 32 * 2  # hidden C / 16, no biases
