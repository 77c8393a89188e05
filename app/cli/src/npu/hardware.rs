//! NPUs behind the Linux driver `amdxdna`.

use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::discovery::{Finding, FoundNpu, Identity, Roots, check, enumerate};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use npuhal_registry::{DeviceAddress, DeviceFactory, DeviceUri, Unavailable};
use std::fs;
use std::path::{Path, PathBuf};

/// Scheme of devices that are named by node or PCI address.
const SCHEME: &str = "amdxdna";

/// Finds the NPUs of this machine: `npu1`, `npu5`, …, or `amdxdna:` with a node or a PCI address behind it.
pub(crate) struct AmdxdnaFactory {
    /// Directory with `sys`, `dev`, `proc` and `etc`; `None` is this machine.
    pub(crate) root: Option<PathBuf>,
}

impl AmdxdnaFactory {
    fn roots(&self) -> Roots {
        self.root.as_deref().map_or_else(Roots::default, Roots::inside)
    }

    fn find(&self, address: &DeviceAddress) -> Option<FoundNpu> {
        let id = address.to_string();
        enumerate(&self.roots()).into_iter().find(|npu| match address {
            DeviceAddress::Path { scheme, path } if scheme == SCHEME => {
                npu.pci_address == *path || npu.node.as_deref() == Some(Path::new(path))
            }
            _ => npu.id == id,
        })
    }
}

impl DeviceFactory for AmdxdnaFactory {
    fn name(&self) -> &str {
        SCHEME
    }

    fn generations(&self) -> &[Generation] {
        &[Generation::Xdna1, Generation::Xdna2]
    }

    fn enumerate(&self) -> Vec<DeviceCard> {
        enumerate(&self.roots()).iter().filter_map(FoundNpu::card).collect()
    }

    fn absence(&self) -> String {
        let roots = self.roots();
        let unserved = unserved(&roots);
        if !unserved.is_empty() {
            return unserved.iter().map(|(_, finding)| finding.to_string()).collect::<Vec<_>>().join("; ");
        }
        let mut nodes = fs::read_dir(roots.dev.join("accel")).into_iter().flatten().flatten();
        if nodes.any(|node| node.file_name().to_string_lossy().starts_with("accel")) {
            "no NPU among the PCI devices".to_owned()
        } else {
            "no /dev/accel/accel* node".to_owned()
        }
    }

    fn resolve(&self, uri: &DeviceUri) -> Option<DeviceCard> {
        let card = self.find(&uri.address)?.card()?;
        Some(DeviceCard { id: uri.id(), ..card })
    }

    fn check(&self, card: &DeviceCard) -> Result<(), Unavailable> {
        let found = card.id.parse::<DeviceUri>().ok().and_then(|uri| self.find(&uri.address));
        let Some(npu) = found else {
            return Err(Unavailable {
                reason: "it is no longer among the PCI devices".to_owned(),
                remedy: "npuhal doctor".to_owned(),
            });
        };
        let findings = check(&self.roots(), &Identity::current(), &npu);
        for finding in findings.iter().filter(|finding| !finding.is_blocking()) {
            tracing::info!(device = card.id, "{finding}; {}", finding.remedy());
        }
        match blocking_findings(&findings) {
            Some(unavailable) => Err(unavailable),
            None => Ok(()),
        }
    }

    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError> {
        let device = uri.id();
        if let Some(key) = uri.parameters.keys().next() {
            return Err(DeviceError::Unsupported {
                device,
                feature: format!("the parameter {key}"),
                remedy: "name it without parameters".to_owned(),
            });
        }
        let npu = self.find(&uri.address).ok_or_else(|| DeviceError::Unavailable {
            device: device.clone(),
            reason: self.absence(),
            remedy: "npuhal doctor".to_owned(),
        })?;
        Ok(Box::new(NpuDevice::open_found(&npu)?))
    }
}

/// What keeps a device from being used, in one piece; `None` where nothing does.
pub(crate) fn blocking_findings(findings: &[Finding]) -> Option<Unavailable> {
    let blocking: Vec<&Finding> = findings.iter().filter(|finding| finding.is_blocking()).collect();
    let first = blocking.first()?;
    Some(Unavailable {
        reason: blocking.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        remedy: first.remedy(),
    })
}

/// NPUs of this machine that are recognised but not served, each with the reason.
pub(crate) fn enumerate_unserved() -> Vec<(FoundNpu, Finding)> {
    unserved(&Roots::default())
}

fn unserved(roots: &Roots) -> Vec<(FoundNpu, Finding)> {
    let unserved = enumerate(roots).into_iter().filter(|npu| npu.silicon.is_none());
    unserved
        .filter_map(|npu| Some((npu.clone(), check(roots, &Identity::current(), &npu).into_iter().next()?)))
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// PCI address, device and revision of parts.
    pub(in crate::npu) const NPU1: (&str, &str, &str) = ("0000:c1:00.1", "0x1502", "0x00");
    pub(in crate::npu) const NPU5: (&str, &str, &str) = ("0000:c4:00.1", "0x17f0", "0x11");

    /// A folder like those of the system with these parts, and a factory that looks there.
    pub(in crate::npu) fn machine(devices: &[(&str, &str, &str)]) -> (TempDir, AmdxdnaFactory) {
        let root = tempfile::tempdir().unwrap();
        for (number, (pci, device, revision)) in devices.iter().enumerate() {
            let directory = root.path().join("sys/bus/pci/devices").join(pci);
            fs::create_dir_all(directory.join(format!("accel/accel{number}"))).unwrap();
            fs::create_dir_all(directory.join("iommu_group")).unwrap();
            fs::create_dir_all(root.path().join("sys/bus/pci/drivers/amdxdna")).unwrap();
            symlink(root.path().join("sys/bus/pci/drivers/amdxdna"), directory.join("driver")).unwrap();
            for (name, text) in [("vendor", "0x1022"), ("device", *device), ("revision", *revision)] {
                fs::write(directory.join(name), text).unwrap();
            }
            fs::create_dir_all(root.path().join("dev/accel")).unwrap();
            fs::write(root.path().join(format!("dev/accel/accel{number}")), "").unwrap();
        }
        let factory = AmdxdnaFactory { root: Some(root.path().to_owned()) };
        (root, factory)
    }

    #[test]
    fn every_part_has_a_card_that_can_be_named() {
        let parts = [
            NPU1,
            ("0000:c2:00.1", "0x17f0", "0x00"),
            ("0000:c3:00.1", "0x17f0", "0x10"),
            NPU5,
            ("0000:c5:00.1", "0x17f0", "0x20"),
            ("0000:c6:00.1", "0x17f0", "0x20"),
        ];
        let (root, factory) = machine(&parts);
        let cards = factory.enumerate();
        let ids: Vec<&str> = cards.iter().map(|card| card.id.as_str()).collect();
        assert_eq!(ids, ["npu1", "npu2", "npu4", "npu5", "npu6", "amdxdna:0000:c6:00.1"]);
        for card in &cards {
            let uri: DeviceUri = card.id.parse().unwrap();
            assert_eq!(factory.resolve(&uri).as_ref(), Some(card));
            assert_eq!(factory.check(card), Ok(()));
        }
        let node: DeviceUri = format!("amdxdna:{}", root.path().join("dev/accel/accel3").display()).parse().unwrap();
        let by_node = factory.resolve(&node).unwrap();
        assert_eq!((by_node.id, by_node.generation, by_node.columns), (node.id(), Generation::Xdna2, 8));
        assert!(factory.resolve(&"amdxdna:/dev/accel/accel9".parse().unwrap()).is_none());
    }

    #[test]
    fn a_card_that_cannot_be_used_says_why() {
        let (root, factory) = machine(&[("0000:c4:00.1", "0x17f0", "0x11")]);
        let directory = root.path().join("sys/bus/pci/devices/0000:c4:00.1");
        fs::remove_file(directory.join("driver")).unwrap();
        fs::remove_dir(directory.join("iommu_group")).unwrap();
        let unavailable = factory.check(&factory.enumerate()[0]).unwrap_err();
        assert_eq!(
            unavailable.to_string(),
            "the module amdxdna is not loaded; the IOMMU is off; memory cannot be shared with the NPU (SVA); \
             sudo modprobe amdxdna"
        );
        fs::remove_dir_all(directory).unwrap();
        let gone = DeviceCard { id: "npu5".to_owned(), ..by_id(&machine(&[("0000:c4:00.1", "0x17f0", "0x11")]).1) };
        assert!(factory.check(&gone).unwrap_err().reason.contains("no longer"));
    }

    fn by_id(factory: &AmdxdnaFactory) -> DeviceCard {
        factory.enumerate().remove(0)
    }

    #[test]
    fn absence_tells_what_was_looked_at() {
        let (_, nothing) = machine(&[]);
        assert_eq!(nothing.absence(), "no /dev/accel/accel* node");
        let (root, foreign) = machine(&[]);
        fs::create_dir_all(root.path().join("dev/accel")).unwrap();
        fs::write(root.path().join("dev/accel/accel0"), "").unwrap();
        assert_eq!(foreign.absence(), "no NPU among the PCI devices");
        let (_root, later) = machine(&[("0000:c4:00.1", "0x17f1", "0x10")]);
        assert!(later.enumerate().is_empty());
        assert!(later.absence().contains("17f1 is a later NPU (AIE4)"), "{}", later.absence());
    }

    #[test]
    fn parameters_are_refused_by_name() {
        let (_root, factory) = machine(&[("0000:c4:00.1", "0x17f0", "0x11")]);
        let error = factory.open(&"npu5?profile=old".parse().unwrap()).err().unwrap();
        assert_eq!(error.to_string(), "npu5 does not support the parameter profile; name it without parameters");
        let error = factory.open(&"npu1".parse().unwrap()).err().unwrap();
        assert!(error.to_string().starts_with("npu1 cannot be used"), "{error}");
    }
}
