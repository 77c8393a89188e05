//! A look for NPU hardware, for as long as no driver backend is linked that does it properly: PCI ids in sysfs and the
//! nodes in `/dev/accel`. It opens nothing.

use npuhal_registry::NpuPresence;
use std::fs;
use std::path::Path;

/// PCI ids of AMD NPUs: Phoenix and Hawk Point; Strix, Strix Halo and Krackan.
const NPU_IDS: [(&str, &str); 2] = [("0x1022", "0x1502"), ("0x1022", "0x17f0")];

/// Looks below `root`, `/` outside tests.
pub(crate) fn look(root: &Path) -> NpuPresence {
    let devices = fs::read_dir(root.join("sys/bus/pci/devices"));
    for device in devices.into_iter().flatten().flatten() {
        let id = |name: &str| fs::read_to_string(device.path().join(name)).unwrap_or_default().trim().to_owned();
        let (vendor, product) = (id("vendor"), id("device"));
        if NPU_IDS.contains(&(vendor.as_str(), product.as_str())) {
            return NpuPresence::Present {
                evidence: format!(
                    "PCI device {}:{}",
                    vendor.trim_start_matches("0x"),
                    product.trim_start_matches("0x")
                ),
            };
        }
    }
    let has_node = fs::read_dir(root.join("dev/accel")).is_ok_and(|nodes| nodes.flatten().next().is_some());
    let node = if has_node { "no NPU among the PCI devices" } else { "no /dev/accel/accel* node" };
    NpuPresence::Absent { evidence: node.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_machine_has_no_npu() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(look(root.path()), NpuPresence::Absent { evidence: "no /dev/accel/accel* node".to_owned() });
    }

    #[test]
    fn a_strix_halo_is_seen_by_its_pci_id() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/bus/pci/devices/0000:c5:00.1");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("vendor"), "0x1022\n").unwrap();
        fs::write(device.join("device"), "0x17f0\n").unwrap();
        assert_eq!(look(root.path()), NpuPresence::Present { evidence: "PCI device 1022:17f0".to_owned() });
    }
}
