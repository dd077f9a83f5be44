"""How curved the loss is: Hessian-vector products, eigenvalues, spectral density."""

from lightning_gossip.analysis.curvature.spectrum import curvature

__all__ = ["curvature"]
