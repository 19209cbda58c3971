"""Linear layers: fused operands, and gradients of matrices stored either way."""

import pytest
import torch

from trireme.models.linear import Linear, add_gradients_, fuse


def test_fused_operand_is_a_view_of_neighbours():
    flat = torch.arange(24.0)
    a, b, c = flat[:8].view(2, 4), flat[8:12].view(1, 4), flat[12:24].view(3, 4)
    assert torch.equal(fuse(a, b, c), flat.view(6, 4))
    assert fuse(a, b).data_ptr() == flat.data_ptr()
    with pytest.raises(AssertionError):
        fuse(a, c)


def test_gradients_of_a_matrix_in_either_order():
    """The matmul is made in the order of the memory: a transposed view gets what the matrix itself does."""
    x, dy, g = torch.randn(7, 3), torch.randn(7, 5), torch.zeros(5, 3)
    add_gradients_(Linear(g.T), Linear(g.T), x, dy)
    assert torch.equal(g, torch.zeros(5, 3).addmm_(dy.T, x))
    stored = torch.zeros(3, 5)
    add_gradients_(Linear(stored), Linear(stored), x, dy)
    assert torch.equal(stored, torch.zeros(3, 5).addmm_(x.T, dy))
