"""Low-rank products and their dropout against plain autograd."""

from __future__ import annotations

import torch

from slurmrl.tensors.ops.products import Dropout, low_rank_linear


def drawn(tokens: int, first: int = 0, rate: float = 0.3) -> Dropout:
    keys = torch.arange(tokens) * 977 + 3
    return Dropout(keys, salt=5, rate=rate, first=first)


def test_low_rank_gradients_equal_plain_products() -> None:
    """Also covers finite differences, and dropout, whose mask the backward pass recomputes."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((7, 10), (3, 10), (6, 3))
    )
    dropout = drawn(7)
    mask = dropout(torch.ones(7, 10, dtype=torch.float64))
    assert 0 < int((mask == 0).sum()) < mask.numel()
    for use, plain in ((None, x), (dropout, x * mask)):
        expected = 0.7 * (plain @ a.t() @ b.t())
        torch.testing.assert_close(low_rank_linear(x, a, b, 0.7, use), expected)
        assert torch.autograd.gradcheck(low_rank_linear, (x, a, b, 0.7, use))


def test_dropout_drops_at_its_rate_and_keeps_the_mean() -> None:
    found = drawn(4000)(torch.ones(4000, 50))
    assert abs(float((found == 0).float().mean()) - 0.3) < 0.005
    assert abs(float(found.mean()) - 1.0) < 0.01
    assert found.unique().tolist() == [0.0, float(torch.tensor(65536 / (65536 - 19661)))]


def test_dropout_depends_only_on_token_and_column() -> None:
    """Ranks with a part of the tokens, in any order, or of the columns, have the same dropout
    masks.
    """
    whole = drawn(9)(torch.ones(9, 30))
    for begin, end in ((0, 7), (5, 14), (14, 30)):
        part = drawn(9, first=begin)(torch.ones(9, end - begin))
        assert torch.equal(part, whole[:, begin:end])
    order = torch.tensor([4, 0, 8])
    some = Dropout(drawn(9).keys[order], salt=5, rate=0.3)(torch.ones(3, 30))
    assert torch.equal(some, whole[order])
    other = Dropout(drawn(9).keys, salt=6, rate=0.3)(torch.ones(9, 30))
    assert not torch.equal(other, whole)
