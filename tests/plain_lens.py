"""The logit lens of tiny models by hand in float64, and tiny models whose norms are not all ones."""

import torch


def uneven(folder, target, seed=3):
    """The model of a folder, with norm weights (and biases) that no two layers share, saved to another folder."""
    import tiny
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.dim() == 1 and "sinks" not in name:
                parameter.copy_(0.5 + 1.5 * torch.rand(parameter.shape, generator=generator))
    hf.save_pretrained(target)
    tiny.tokenizer().save_pretrained(target)
    return target


def lens_by_hand(family, hf, resid):
    """Logits [..., V] in float64 of hidden states [..., D]: a final norm written out, the head, Gemma's soft-cap."""
    h = resid.double()
    if family == "gpt2":
        norm = hf.transformer.ln_f
        h = h - h.mean(-1, keepdim=True)
        h = h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double() + norm.bias.double()
    else:
        weight = hf.model.norm.weight.double() + (1 if family == "gemma2" else 0)
        h = h / (h.pow(2).mean(-1, keepdim=True) + hf.config.rms_norm_eps).sqrt() * weight
    logits = h @ (hf.transformer.wte if family == "gpt2" else hf.lm_head).weight.double().T
    return 5 * (logits / 5).tanh() if family == "gemma2" else logits
