"""Plans of several PD clusters that share several PrfaaS clusters."""
