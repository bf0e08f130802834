"""Clients of Azure that several subjects need: Azure Resource Manager and Microsoft Entra."""
