//! The sections put together: compute units and their images.

use super::layout::IP_PS_KERNEL;
use super::{AddressQualifier, Connection, IpEntry, Kernel, MemoryBank, Metadata, Partition};
use super::{Xclbin, XclbinError, XclbinHeader, XclbinSection, kind};

/// Compute units the driver accepts.
const MAX_COMPUTE_UNITS: usize = 32;
/// Type of NPU kernels in the metadata.
const KERNEL_KIND: &str = "dpu";
const MEMORY_DRAM: u8 = 1;
/// Name of the argument that holds the instruction buffer, which lives in the second bank.
const INSTRUCTION_ARGUMENT: &str = "instr";

/// A kernel instance with its place in the driver's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeUnit {
    /// Bit in the compute-unit mask of a command packet.
    pub index: u32,
    /// Index in [`Metadata::kernels`].
    pub kernel: usize,
    /// Instance name.
    pub instance: String,
    /// Kernel id.
    pub dpu_kernel_id: u64,
    /// Index in [`Partition::pdis`].
    pub pdi: usize,
}

/// What a hardware context needs to know about an xclbin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Design {
    /// UUID of the file.
    pub uuid: [u8; 16],
    /// Columns and images.
    pub partition: Partition,
    /// Kernels.
    pub metadata: Metadata,
    /// Compute units in the driver's order.
    pub compute_units: Vec<ComputeUnit>,
}

impl Design {
    /// Parses a file and resolves its compute units.
    pub fn parse(bytes: &[u8]) -> Result<Self, XclbinError> {
        Self::new(&Xclbin::parse(bytes)?)
    }

    /// Resolves a container's compute units.
    pub fn new(xclbin: &Xclbin) -> Result<Self, XclbinError> {
        let partition = Partition::parse(xclbin.required(kind::AIE_PARTITION)?)?;
        if partition.column_width == 0 {
            return Err(XclbinError::Invalid { what: "AIE_PARTITION".to_owned(), reason: "0 columns".to_owned() });
        }
        let metadata = Metadata::parse(xclbin.required(kind::EMBEDDED_METADATA)?)?;
        let compute_units = compute_units(&metadata, &partition)?;
        Ok(Self { uuid: xclbin.header.uuid, partition, metadata, compute_units })
    }

    /// Kernel of a compute unit.
    pub fn kernel(&self, unit: &ComputeUnit) -> Option<&Kernel> {
        self.metadata.kernels.get(unit.kernel)
    }

    /// Partition image of a compute unit.
    pub fn image(&self, unit: &ComputeUnit) -> Option<&[u8]> {
        self.partition.pdis.get(unit.pdi).map(|pdi| pdi.image.as_slice())
    }

    /// Finds `kernel:instance`, or the first instance of `kernel`.
    pub fn compute_unit(&self, name: &str) -> Option<&ComputeUnit> {
        let (kernel, instance) = match name.split_once(':') {
            Some((kernel, instance)) => (kernel, Some(instance)),
            None => (name, None),
        };
        self.compute_units.iter().find(|unit| {
            self.kernel(unit).is_some_and(|k| k.name == kernel) && instance.is_none_or(|i| i == unit.instance)
        })
    }
}

/// Instances in metadata order that have an image; those without are left out.
fn compute_units(metadata: &Metadata, partition: &Partition) -> Result<Vec<ComputeUnit>, XclbinError> {
    let mut units = Vec::new();
    for (index, kernel) in metadata.kernels.iter().enumerate().filter(|(_, kernel)| kernel.kind == KERNEL_KIND) {
        let Some(dpu_kernel_id) = kernel.dpu_kernel_id else { continue };
        let Some(pdi) = partition.pdi_of_kernel(dpu_kernel_id) else { continue };
        for instance in &kernel.instances {
            if units.len() == MAX_COMPUTE_UNITS {
                return Err(XclbinError::Invalid {
                    what: "EMBEDDED_METADATA".to_owned(),
                    reason: format!("more than the {MAX_COMPUTE_UNITS} compute units the driver accepts"),
                });
            }
            let instance = instance.clone();
            units.push(ComputeUnit { index: units.len() as u32, kernel: index, instance, dpu_kernel_id, pdi });
        }
    }
    Ok(units)
}

/// Content of an xclbin to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesignSpec {
    /// UUID of the file.
    pub uuid: [u8; 16],
    /// Columns and images.
    pub partition: Partition,
    /// Kernels.
    pub metadata: Metadata,
}

impl DesignSpec {
    /// The container, with all sections that runtimes look for.
    pub fn build(&self) -> Result<Xclbin, XclbinError> {
        let (ips, connections) = self.layout()?;
        let banks = MemoryBank::write_section(&[bank(*b"HOST\0\0\0\0\0\0\0\0\0\0\0\0", 0x1_0000), {
            bank(*b"SRAM\0\0\0\0\0\0\0\0\0\0\0\0", 0xC000)
        }]);
        let connections = Connection::write_section(&connections);
        let sections = vec![
            XclbinSection::new(kind::EMBEDDED_METADATA, self.metadata.to_xml().into_bytes()),
            XclbinSection::new(kind::MEM_TOPOLOGY, banks.clone()),
            XclbinSection::new(kind::IP_LAYOUT, IpEntry::write_section(&ips)),
            XclbinSection::new(kind::CONNECTIVITY, connections.clone()),
            XclbinSection::new(kind::GROUP_TOPOLOGY, banks),
            XclbinSection::new(kind::GROUP_CONNECTIVITY, connections),
            XclbinSection::new(kind::AIE_PARTITION, self.partition.to_bytes()?),
        ];
        Ok(Xclbin { header: XclbinHeader::new(self.uuid), sections })
    }

    /// IP_LAYOUT and CONNECTIVITY entries of all instances.
    fn layout(&self) -> Result<(Vec<IpEntry>, Vec<Connection>), XclbinError> {
        let (mut ips, mut connections) = (Vec::new(), Vec::new());
        for kernel in &self.metadata.kernels {
            for instance in &kernel.instances {
                let ip = ips.len() as i32;
                ips.push(ip_entry(kernel, instance)?);
                let buffers = kernel.arguments.iter().filter(|a| a.qualifier == AddressQualifier::Global);
                connections.extend(buffers.map(|argument| Connection {
                    argument: argument.id as i32,
                    ip,
                    bank: i32::from(argument.name == INSTRUCTION_ARGUMENT),
                }));
            }
        }
        Ok((ips, connections))
    }
}

fn ip_entry(kernel: &Kernel, instance: &str) -> Result<IpEntry, XclbinError> {
    let text = format!("{}:{instance}", kernel.name);
    let mut name = [0; 64];
    match name.get_mut(..text.len()) {
        Some(field) if text.len() < 64 => field.copy_from_slice(text.as_bytes()),
        _ => return Err(XclbinError::TextTooLong { what: "kernel instance name", text, max_bytes: 63 }),
    }
    let id = kernel.dpu_kernel_id.unwrap_or(0) as u32 & 0xFFF;
    let properties = kernel.subtype & 3 | (kernel.functional & 3) << 4 | id << 16;
    Ok(IpEntry { kind: IP_PS_KERNEL, properties, base: u64::MAX, name })
}

fn bank(tag: [u8; 16], size_kib: u64) -> MemoryBank {
    MemoryBank { kind: MEMORY_DRAM, used: 1, pad: [0; 6], size_kib, base: 0x0400_0000, tag }
}
