//! Ways of the arrows between the cells of a drawn array: up and down in the gaps between columns, left and right in those
//! between rows, so that no arrow crosses a cell.

use super::{Array, Channel, Spot};
use std::collections::BTreeMap;

/// Sizes of the drawing, in its own units.
pub(super) const CELL_WIDTH: f64 = 200.0;
pub(super) const CELL_HEIGHT: f64 = 110.0;
const COLUMN_GAP: f64 = 25.0;
const ROW_GAP: f64 = 35.0;
const PORT_OFFSET: f64 = 5.0;
/// What is left free for the heads of arrows at both sides of a gap between rows.
const HEAD_ROOM: f64 = 6.5;
pub(super) const LEFT: f64 = 40.0;
pub(super) const TOP: f64 = 70.0;

/// Upper left corner of a cell; row 0 is at the bottom.
pub(super) fn corner(array: &Array, spot: Spot) -> (f64, f64) {
    let below_top = f64::from(array.grid.rows - 1 - spot.row.min(array.grid.rows - 1));
    (LEFT + f64::from(spot.col) * (CELL_WIDTH + COLUMN_GAP), TOP + below_top * (CELL_HEIGHT + ROW_GAP))
}

/// An edge of a cell.
type Edge = (Spot, bool);

/// A place in a gap: by number of the gap and key of its user.
type Tracks<K> = BTreeMap<u8, Vec<K>>;

/// The arrows of an array as corners of polylines, in the order of its channels.
pub(super) struct Ways<'a> {
    array: &'a Array,
    /// Users of each upper (`true`) or lower edge, left to right.
    ports: BTreeMap<Edge, Vec<(String, Spot)>>,
    /// Families in the gap above each row, and channels in the gap left of each column.
    rows: Tracks<String>,
    columns: Tracks<(String, Spot, Spot)>,
}

/// Which gaps a channel takes.
struct Plan {
    leaves: Edge,
    enters: Edge,
    /// Gap above this row, next to the source.
    first: u8,
    /// Gap left of this column, where the rows are not neighbours, and the gap above a row next to the destination.
    detour: Option<(u8, u8)>,
}

fn plan(array: &Array, channel: &Channel) -> Plan {
    let (from, to) = (channel.source, channel.destination);
    let upward = to.row > from.row;
    if from.row == to.row {
        // Above the uppermost row is the title.
        let above = from.row + 1 < array.grid.rows;
        let first = if above { from.row } else { from.row.saturating_sub(1) };
        return Plan { leaves: (from, above), enters: (to, above), first, detour: None };
    }
    let (first, last) = if upward { (from.row, to.row - 1) } else { (from.row - 1, to.row) };
    let detour = (first != last).then_some((if upward { to.col } else { from.col + 1 }, last));
    Plan { leaves: (from, upward), enters: (to, !upward), first, detour }
}

impl<'a> Ways<'a> {
    pub(super) fn new(array: &'a Array) -> Self {
        let (mut ports, mut rows, mut columns) = (BTreeMap::new(), Tracks::new(), Tracks::new());
        for channel in &array.channels {
            let Plan { leaves, enters, first, detour } = plan(array, channel);
            use_port(&mut ports, array, leaves, channel, channel.destination);
            use_port(&mut ports, array, enters, channel, channel.source);
            let family = channel.family().to_owned();
            take(&mut rows, first, family.clone());
            if let Some((column, last)) = detour {
                take(&mut columns, column, Self::key(channel));
                take(&mut rows, last, family);
            }
        }
        for users in ports.values_mut() {
            // Neighbours on the other side stay neighbours on the edge.
            users.sort_by(|a: &(String, Spot), b| (a.1.col, &a.0).cmp(&(b.1.col, &b.0)));
        }
        Self { array, ports, rows, columns }
    }

    fn key(channel: &Channel) -> (String, Spot, Spot) {
        (channel.name.clone(), channel.source, channel.destination)
    }

    /// Corners of the arrow of `channel`.
    pub(super) fn of(&self, channel: &Channel) -> Vec<(f64, f64)> {
        let Plan { leaves, enters, first, detour } = plan(self.array, channel);
        let from = self.port(leaves, channel, channel.destination);
        let to = self.port(enters, channel, channel.source);
        let family = channel.family();
        let first_y = self.row_track(first, family);
        let mut corners = vec![from, (from.0, first_y)];
        if let Some((column, last)) = detour {
            let x = self.column_track(column, channel);
            let last_y = self.row_track(last, family);
            corners.extend([(x, first_y), (x, last_y), (to.0, last_y)]);
        } else {
            corners.push((to.0, first_y));
        }
        corners.push(to);
        corners
    }

    fn port(&self, edge: Edge, channel: &Channel, other: Spot) -> (f64, f64) {
        let (x, y) = corner(self.array, edge.0);
        let user = port_user(self.array, edge, channel, other);
        let users = self.ports.get(&edge).map_or(&[][..], Vec::as_slice);
        let at = users.iter().position(|held| *held == user).unwrap_or(0);
        let share = (at as f64 + 1.0) / (users.len() as f64 + 1.0);
        // Upper and lower edges are set apart, so that lines from both do not cover each other between them.
        let x = x + CELL_WIDTH * share;
        if edge.1 { (x - PORT_OFFSET, y) } else { (x + PORT_OFFSET, y + CELL_HEIGHT) }
    }

    fn row_track(&self, above: u8, family: &str) -> f64 {
        let (_, top) = corner(self.array, Spot { col: 0, row: above });
        top - HEAD_ROOM - (ROW_GAP - 2.0 * HEAD_ROOM) * share(self.rows.get(&above), |held| held == family)
    }

    fn column_track(&self, column: u8, channel: &Channel) -> f64 {
        let key = Self::key(channel);
        let left = LEFT + f64::from(column) * (CELL_WIDTH + COLUMN_GAP);
        left - COLUMN_GAP * share(self.columns.get(&column), |held| *held == key)
    }
}

/// Who uses a port: a channel by itself, or all channels of one name at this edge.
fn port_user(array: &Array, edge: Edge, channel: &Channel, other: Spot) -> (String, Spot) {
    let at_edge = |held: &&Channel| {
        let Plan { leaves, enters, .. } = plan(array, held);
        held.name == channel.name && (leaves == edge || enters == edge)
    };
    let is_bus = array.channels.iter().filter(at_edge).count() > 1;
    (channel.name.clone(), if is_bus { Spot { col: edge.0.col, row: 0 } } else { other })
}

fn use_port(
    ports: &mut BTreeMap<Edge, Vec<(String, Spot)>>,
    array: &Array,
    edge: Edge,
    channel: &Channel,
    other: Spot,
) {
    let user = port_user(array, edge, channel, other);
    let users = ports.entry(edge).or_default();
    if !users.contains(&user) {
        users.push(user);
    }
}

fn take<K: PartialEq>(tracks: &mut Tracks<K>, gap: u8, key: K) {
    let users = tracks.entry(gap).or_default();
    if !users.contains(&key) {
        users.push(key);
    }
}

/// Which part of a gap a user has, counted from its far side.
fn share<K>(users: Option<&Vec<K>>, is_it: impl Fn(&K) -> bool) -> f64 {
    let users = users.map_or(&[][..], Vec::as_slice);
    let at = users.iter().position(is_it).unwrap_or(0);
    (at as f64 + 1.0) / (users.len() as f64 + 1.0)
}
