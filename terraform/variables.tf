variable "project_id" {
  description = "The Google Cloud project, with billing enabled: its id, not its name or number."
  type        = string
  default     = "" # refused below, in clearer words than Terraform has

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project_id)) && !contains(["your-gcp-project-id", "your-project-id", "my-project-id", "my-project"], var.project_id)
    error_message = "project_id is \"${var.project_id}\", a placeholder or no id at all: put your project's id in terraform.tfvars (gcloud projects list shows ids; 6 to 30 lower-case letters, digits, hyphens)."
  }
}

variable "zone" {
  description = "A zone with L4 GPUs. The region follows from it."
  type        = string
  default     = "us-central1-a"
}

variable "cluster_name" {
  description = "Name of the cluster; network, repository and service accounts are named after it."
  type        = string
  default     = "jax-gpu-cluster"

  validation {
    condition     = length(var.cluster_name) <= 24
    error_message = "cluster_name \"${var.cluster_name}\" is too long: a service account's id, this name and \"-nodes\", holds 30 characters; give at most 24."
  }
  validation {
    condition     = can(regex("^[a-z](-?[a-z0-9])*$", var.cluster_name))
    error_message = "cluster_name is \"${var.cluster_name}\": use lower-case letters, digits and single hyphens, starting with a letter."
  }
}

variable "machine_type" {
  description = "A g2-standard machine for the GPU nodes. It decides the number of L4 GPUs; deploy/ asks for the default's one."
  type        = string
  default     = "g2-standard-8"
}

variable "min_gpu_nodes" {
  description = "GPU nodes kept running. 0: no GPU is paid for while no pod asks for one."
  type        = number
  default     = 0
}

variable "max_gpu_nodes" {
  description = "GPU nodes at most: the upper bound of the bill, and what the quota must allow."
  type        = number
  default     = 1
}

variable "provisioning" {
  description = "How GPU nodes are obtained: on_demand, spot, reservation or flex_start."
  type        = string
  default     = "on_demand"

  validation {
    condition     = contains(["on_demand", "spot", "reservation", "flex_start"], var.provisioning)
    error_message = "provisioning is \"${var.provisioning}\": give on_demand, spot, reservation or flex_start."
  }
}

variable "reservation" {
  description = "With provisioning = \"reservation\": its name, or projects/PROJECT/reservations/NAME for a shared one."
  type        = string
  default     = ""
}

variable "admin_cidrs" {
  description = "Address ranges that may also reach the control plane by IP. Empty: only its DNS name, which IAM guards."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : can(cidrnetmask(cidr))]) # IPv4 only
    error_message = "admin_cidrs holds ${jsonencode(var.admin_cidrs)}: give IPv4 ranges such as 203.0.113.7/32."
  }
  validation {
    condition     = alltrue([for cidr in var.admin_cidrs : try(tonumber(split("/", cidr)[1]), 32) >= 8])
    error_message = "admin_cidrs holds ${jsonencode(var.admin_cidrs)}: a range wider than /8, as 0.0.0.0/0 is, opens the control plane to everybody; give your own address as A.B.C.D/32."
  }
}

variable "class_day" {
  description = "YYYY-MM-DD: no minor and no node upgrades from the day before to the day after. Empty: weekends only."
  type        = string
  default     = ""

  validation {
    condition     = var.class_day == "" || can(timeadd("${var.class_day}T00:00:00Z", "0h"))
    error_message = "class_day is \"${var.class_day}\": give a date as YYYY-MM-DD, such as 2027-03-15."
  }
}
