"""The included model in a form too simple to be wrong: float64, one document, head and token at a time.

It shares no code with ``trainer_integration.moe``; weights have the names of that package.
"""

import math

import torch


def reference_losses(weights, config, rows):
    """Return token, balance and z-loss, summed as those of a microbatch, and the number of dropped choices.

    ``rows`` has lists of documents, each an array of token ids.
    """
    token_loss = balance = z = 0.0
    dropped = 0
    for row in rows:
        if not row:
            continue
        documents = [torch.as_tensor(document).long() for document in row]
        labels = sum(len(document) - 1 for document in documents)
        xs = [weights["embedding_VD"][document] for document in documents]
        balances, zs = [], []
        for layer in range(config.num_layers):
            at = f"blocks.{layer}."
            xs = [
                x
                + _attention(weights, at, config, _norm(x, weights[at + "norm1.weight_D"], config))
                for x in xs
            ]
            normed = _norm(torch.cat(xs), weights[at + "norm2.weight_D"], config)
            added, layer_balance, layer_z, layer_dropped = _experts(weights, at, config, normed)
            xs = [x + part for x, part in zip(xs, added.split([len(x) for x in xs]), strict=True)]
            balances.append(layer_balance)
            zs.append(layer_z)
            dropped += layer_dropped
        head = weights["embedding_VD" if config.tied_embeddings else "output_VD"]
        for x, document in zip(xs, documents, strict=True):
            logits = _norm(x, weights["norm.weight_D"], config) @ head.T
            for t in range(len(document) - 1):
                token_loss = token_loss + torch.logsumexp(logits[t], 0) - logits[t, document[t + 1]]
        balance = balance + labels * sum(balances) / len(balances)
        z = z + labels * sum(zs) / len(zs)
    return token_loss, balance, z, dropped


def _norm(x, weight, config):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_epsilon) * weight


def _turned(head, theta):
    """Return rotary positions as products of complex numbers, [T, C]."""
    length, width = head.shape
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    number = torch.complex(head[:, : width // 2], head[:, width // 2 :])
    turned = number * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=1)


def _attention(weights, at, config, x):
    """Return the attention of one document."""
    width, per_kv = config.head_dim, config.num_heads // config.num_kv_heads
    projected = x @ weights[at + "attention.qkv.weight"].T
    heads = projected.split(width, dim=1)
    queries = heads[: config.num_heads]
    keys = heads[config.num_heads : config.num_heads + config.num_kv_heads]
    values = heads[config.num_heads + config.num_kv_heads :]
    later = torch.ones(len(x), len(x)).triu(1).bool()
    outputs = []
    for h, query in enumerate(queries):
        key = _turned(keys[h // per_kv], config.rope_theta)
        scores = _turned(query, config.rope_theta) @ key.T / math.sqrt(width)
        outputs.append(scores.masked_fill(later, -math.inf).softmax(1) @ values[h // per_kv])
    return torch.cat(outputs, dim=1) @ weights[at + "attention.output.weight"].T


def _experts(weights, at, config, x):
    """Return, for all tokens of a row, the sum to add, balance loss, z-loss and dropped choices."""
    num, top_k = config.num_experts, config.top_k
    logits = x @ weights[at + "router.weight_ED"].T
    probabilities = logits.softmax(-1)
    choices = [
        sorted(range(num), key=lambda e: -probabilities[t, e].item())[:top_k] for t in range(len(x))
    ]
    per_group = num // config.groups
    kept = {(t, e) for t in range(len(x)) for e in choices[t]}
    if config.capacity_factor is not None:
        room = math.ceil(config.capacity_factor * len(x) * top_k / config.groups)
        for group in range(config.groups):
            of_group = [
                (t, e) for t in range(len(x)) for e in choices[t] if e // per_group == group
            ]
            of_group.sort(key=lambda choice: -probabilities[choice].item())
            kept -= set(of_group[room:])
    added = []
    for t in range(len(x)):
        chosen = [probabilities[t, e] for e in choices[t]]
        total = torch.zeros_like(x[t])
        for e, probability in zip(choices[t], chosen, strict=True):
            if (t, e) not in kept:
                continue
            gate = probability if top_k == 1 else probability / sum(chosen)
            fc1, fc3 = (weights[at + "experts.fc13_EXD"][e] @ x[t]).chunk(2)
            inside = fc1 * torch.sigmoid(fc1) * fc3
            total = total + gate * (weights[at + "experts.fc2_EDF"][e] @ inside)
        added.append(total)
    balance = 0.0
    for group in range(config.groups):
        members = range(group * per_group, (group + 1) * per_group)
        share = sum(e in members for of_token in choices for e in of_token) / (len(x) * top_k)
        balance = balance + config.groups * share * probabilities[:, list(members)].sum(1).mean()
    z = torch.logsumexp(logits, -1).square().mean()
    return torch.stack(added), balance, z, top_k * len(x) - len(kept)
