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


def test_starts_and_follows_its_batches_as_the_authors_does():
    channel, spatial = block_attention(32)
    assert all((layer.bias == 0).all() for layer in (channel.fc1, channel.fc2))
    x = torch.randn(4, 32, 9, 9)
    scaled = channel(x)
    convolved = F.conv2d(torch.cat([scaled.amax(1, True), scaled.mean(1, True)], 1), spatial.conv.weight, padding=3)
    spatial(scaled)
    torch.testing.assert_close(spatial.norm.running_mean, 0.01 * convolved.detach().mean((0, 2, 3)))
