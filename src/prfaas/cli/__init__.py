"""Commands. The only place that wires objects together and configures output."""
