// What is selected, and what belongs to it. A selection is
// {about: "node" | "link" | "request", id}. Pure.

/** The selection that an event's `where` means: a link, or a node by name; null for a cluster. */
export function selectionOf(where, scene) {
  if (scene.links.has(where)) return { about: "link", id: where };
  for (const cluster of scene.clusters.values()) {
    for (const node of cluster.nodes.values()) {
      if (node.name === where || node.id === where) return { about: "node", id: node.id };
    }
  }
  return null;
}

/** The selection itself, and the nodes and the link that a selected request used. */
export function markedBy(selection, requests, scene) {
  const marked = new Set();
  if (selection === null) return marked;
  marked.add(keyOf(selection));
  const request = selection.about === "request" && requests.find((one) => one.id === selection.id);
  if (!request) return marked;
  const clusters = {};
  for (const cluster of scene.clusters.values()) {
    for (const node of cluster.nodes.values()) {
      for (const part of ["prefill", "decode"]) {
        if (node.name !== request[part]) continue;
        marked.add(keyOf({ about: "node", id: node.id }));
        clusters[part] = cluster.name;
      }
    }
  }
  marked.add(keyOf({ about: "link", id: `${clusters.prefill} -> ${clusters.decode}` }));
  return marked;
}

export function keyOf({ about, id }) {
  return `${about} ${id}`;
}
