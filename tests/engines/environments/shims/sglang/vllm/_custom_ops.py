"""The operator that SGLang on a CPU without sgl-kernel imports from vllm, computed with torch."""

from torch import Tensor


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Rotate ``query`` and ``key`` [T, heads * head_size] in place by their ``positions`` [T].

    A row of ``cos_sin_cache`` has the cosines of a position and then its sines. With ``is_neox``
    the two coordinates of a rotation are half the rotated width apart, else side by side.
    """
    cosine, sine = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    half = cosine.shape[-1]
    for states in (query, key):
        heads = states.view(positions.numel(), -1, head_size)
        if is_neox:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        else:
            first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        turned = first * cosine - second * sine, second * cosine + first * sine
        first.copy_(turned[0])
        second.copy_(turned[1])
