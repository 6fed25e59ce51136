"""Rows of tokens moved to their experts' places and added up again, in eager PyTorch."""

import torch


def _token_of_row(token_topk_to_pos: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows], the token of each row; of padding the number behind the last token."""
    tokens, choices = token_topk_to_pos.shape
    place = token_topk_to_pos.reshape(-1)
    place = torch.where(place < 0, rows, place).long()  # one row more, which is cut off
    token = torch.arange(tokens, device=place.device).repeat_interleave(choices)
    return torch.full((rows + 1,), tokens, device=place.device).scatter_(0, place, token)[:rows]


def _gathered(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows, with zeros behind the last; 8-bit floats as bytes, for which indexing is there on every device."""
    bits = values.view(torch.uint8) if values.element_size() == 1 else values
    zeros = torch.zeros(1, bits.shape[1], dtype=bits.dtype, device=bits.device)
    return torch.cat([bits, zeros]).index_select(0, rows).view(values.dtype)


def run_expand_to_fused(x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> torch.Tensor:
    """Rows by expert: the table of choices is turned round, then one gather.

    x [M, H], token_topk_to_pos [M, K], pos_to_expert [P] -> [P, H], zeros for padding.
    """
    return _gathered(x, _token_of_row(token_topk_to_pos, pos_to_expert.shape[0]))


def run_expand_to_fused_with_sf(
    x: torch.Tensor, scale: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by expert: the table of choices is turned round, then a gather of each.

    x [M, H], scale [M, S], token_topk_to_pos [M, K], pos_to_expert [P] -> [P, H], [P, S], zeros for padding.
    """
    rows = _token_of_row(token_topk_to_pos, pos_to_expert.shape[0])
    return _gathered(x, rows), _gathered(scale, rows)


def run_expand_to_fused_with_sf_ue8m0(
    x: torch.Tensor, scale: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for words of exponents, which come back column by column, each column at a multiple of 16 bytes.

    x [M, H], scale [M, S], token_topk_to_pos [M, K], pos_to_expert [P] -> [P, H], [P, S] with strides 1 and ceil(P / 4) * 4.
    """
    count = pos_to_expert.shape[0]
    rows = _token_of_row(token_topk_to_pos, count)
    columns = torch.empty(scale.shape[1], -(-count // 4) * 4, dtype=scale.dtype, device=scale.device)
    moved = columns.t()[:count]
    moved.copy_(_gathered(scale, rows))
    return _gathered(x, rows), moved


def _rows_of_choices(x: torch.Tensor, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    """[M, K, H] in float32, zeros for choices without a row."""
    rows = x.shape[0]
    place = token_topk_to_pos.reshape(-1)
    found = _gathered(x, torch.where(place < 0, rows, place).long())
    return found.float().view(*token_topk_to_pos.shape, x.shape[1])


def run_reduce_fused(x: torch.Tensor, weights: torch.Tensor, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    """A gather, a product and a sum over the choices, as transformers' grouped experts end.

    x [P, H], weights [M, K], token_topk_to_pos [M, K] -> [M, H].
    """
    factors = weights.masked_fill(token_topk_to_pos < 0, 0.0)
    return (_rows_of_choices(x, token_topk_to_pos) * factors.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def run_reduce_fused_unweighted(x: torch.Tensor, token_topk_to_pos: torch.Tensor) -> torch.Tensor:
    """A gather and a sum over the choices.

    x [P, H], token_topk_to_pos [M, K] -> [M, H].
    """
    return _rows_of_choices(x, token_topk_to_pos).sum(dim=1).to(x.dtype)


def run_reduce_fused_scaled(
    x: torch.Tensor, row_scale: torch.Tensor, weights: torch.Tensor, token_topk_to_pos: torch.Tensor
) -> torch.Tensor:
    """Two gathers, two products and a sum over the choices.

    x [P, H], row_scale [P], weights [M, K], token_topk_to_pos [M, K] -> [M, H] in bfloat16.
    """
    unused = token_topk_to_pos < 0
    place = torch.where(unused, x.shape[0], token_topk_to_pos).long()
    factors = weights.masked_fill(unused, 0.0) * torch.cat([row_scale, row_scale.new_zeros(1)])[place]
    return (_rows_of_choices(x, token_topk_to_pos) * factors.unsqueeze(-1)).sum(dim=1).to(torch.bfloat16)


def run_reduce_fused_to_fp8(
    x: torch.Tensor, weights: torch.Tensor, token_topk_to_pos: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """A gather, a product, a sum over the choices and the cast.

    x [P, H], weights [M, K], token_topk_to_pos [M, K], scale [1] -> [M, H] in float8_e4m3fn.
    """
    factors = weights.masked_fill(token_topk_to_pos < 0, 0.0)
    summed = (_rows_of_choices(x, token_topk_to_pos) * factors.unsqueeze(-1)).sum(dim=1)
    return (summed * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
