"""Kustomize manifests of a deployment (`prfaas render kubernetes`)."""
