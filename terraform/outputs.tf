locals {
  # USD an hour, us-central1, list prices as of 2026. To check: https://cloud.google.com/compute/vm-instance-pricing,
  # https://cloud.google.com/compute/gpus-pricing and https://cloud.google.com/kubernetes-engine/pricing
  price    = { l4 = 0.56, g2_vcpu = 0.0367, system_node = 0.067, cluster = 0.10 } # a vCPU with its 4 GB
  vcpus    = try(tonumber(regex("[0-9]+$", var.machine_type)), 0)
  gpu_node = local.price.l4 * local.gpu_count + local.price.g2_vcpu * local.vcpus
  always   = local.price.system_node + local.price.cluster
}

output "get_credentials_command" {
  description = "Run it to connect kubectl: $(terraform output -raw get_credentials_command)"
  value       = "gcloud container clusters get-credentials ${google_container_cluster.main.name} --location ${var.zone} --project ${var.project_id} --dns-endpoint"
}

output "gpu_count" {
  description = "L4 GPUs of one node"
  value       = local.gpu_count
}

output "image_repository" {
  description = "Where images go: REGION-docker.pkg.dev/PROJECT/REPOSITORY"
  value       = "${local.region}-docker.pkg.dev/${var.project_id}/${google_artifact_registry_repository.images.repository_id}"
}

output "build_service_account" {
  description = "The account that Cloud Build runs as"
  value       = google_service_account.build.email
}

output "cost_note" {
  description = "What it costs, from list prices: arithmetic, no offer"
  value = join(" ", compact([
    format("A GPU node (%s): %d x L4 %.2f + %d x vCPU %.4f = about USD %.2f an hour on demand, while pods ask for it.",
    var.machine_type, local.gpu_count, local.price.l4, local.vcpus, local.price.g2_vcpu, local.gpu_node),
    format("At most %d at a time: USD %.2f an hour.", var.max_gpu_nodes, local.gpu_node * var.max_gpu_nodes),
    format("Kept running: %d, USD %.2f an hour.", var.min_gpu_nodes, local.gpu_node * var.min_gpu_nodes),
    format("Always, until teardown: system node and cluster fee, USD %.2f an hour; disks, images and what comes through the NAT (an image from nvcr.io: by the gigabyte) are extra.", local.always),
    contains(["spot", "flex_start"], var.provisioning) ? "With ${var.provisioning} GPU nodes cost less; how much less changes: https://cloud.google.com/spot-vms/pricing, https://cloud.google.com/products/dws/pricing." : "",
    var.provisioning == "reservation" ? "A reservation is billed whether or not its machines run." : "",
    "List prices of us-central1 as of 2026: check https://cloud.google.com/compute/vm-instance-pricing.",
  ]))
}

output "project_id" { value = var.project_id }

output "zone" { value = var.zone }

output "region" { value = local.region }

output "cluster_name" { value = google_container_cluster.main.name }
