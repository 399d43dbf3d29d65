import torch
from per_sample import normalise, shake
from torch.nn import functional as F

from kernelwarehouse.peers.cbam import block_attention


def test_channel_gate_then_spatial_gate():
    gate = shake(block_attention(32).double()).eval()
    channel, spatial = gate
    x = torch.randn(3, 32, 9, 8, dtype=torch.float64)

    def mlp(v):
        hidden = (channel.fc1.weight[:, :, 0, 0] @ v + channel.fc1.bias).relu()
        return channel.fc2.weight[:, :, 0, 0] @ hidden + channel.fc2.bias

    expected = []
    for sample in x:
        scaled = sample * torch.sigmoid(mlp(sample.mean((1, 2))) + mlp(sample.amax((1, 2)))).view(-1, 1, 1)
        maps = torch.stack([scaled.amax(0), scaled.mean(0)])
        expected.append(scaled * torch.sigmoid(normalise(spatial.norm, F.conv2d(maps, spatial.conv.weight, padding=3))))
    torch.testing.assert_close(gate(x), torch.stack(expected))


def test_spatial_gate_starts_even():
    gate = block_attention(16)[1]
    x = torch.randn(2, 16, 5, 5)
    torch.testing.assert_close(gate(x), x / 2)
